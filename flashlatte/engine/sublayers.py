"""The pairs of attention and MLP in a model's decoder layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Sublayer:
    """One of the two pairs of a decoder layer of LongCat-Flash (arXiv:2509.01322, §2.2), named as in other models.

    Attributes:
        shortcut: the experts, which read the input of the first pair's MLP; None in the second pair, which adds their
            output.
    """

    input_layernorm: Any
    self_attn: Any
    post_attention_layernorm: Any
    mlp: Any
    shortcut: Any


def sublayers(model: Any) -> list[Any]:
    """The decoder layers of a transformers model, or the pairs in them if they have several."""
    found = []
    for layer in model.model.layers:
        if not isinstance(layer.self_attn, nn.ModuleList):
            found.append(layer)
            continue
        for index, parts in enumerate(
            zip(layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlps, strict=True)
        ):
            found.append(Sublayer(*parts, layer.mlp if index == 0 else None))
    return found
