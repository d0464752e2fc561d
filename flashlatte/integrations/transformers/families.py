"""The models of transformers that ``enable`` serves: where their classes are. Importing this imports no model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flashlatte.layers import models
from flashlatte.layers.config import QueryScaling


@dataclass(frozen=True)
class Family:
    """A package of ``transformers.models`` with one decoder and one attention class.

    Attributes:
        model_type: name of the package, and of the family in ``flashlatte.layers.models``.
        prefix: of its classes' names.
        attention: name of the attention class after the prefix.
        returns_choice: whether an attention returns, third, which tokens its indexer chose, for layers that share it.
    """

    model_type: str
    prefix: str
    attention: str = "Attention"
    returns_choice: bool = False

    @property
    def module(self) -> str:
        return f"transformers.models.{self.model_type}.modeling_{self.model_type}"

    @property
    def host(self) -> Any:
        """The module that defines the classes, which whoever holds an object of one has imported."""
        return sys.modules[self.module]

    @property
    def decoder_class(self) -> type[nn.Module]:
        return getattr(self.host, f"{self.prefix}Model")

    @property
    def attention_class(self) -> type[nn.Module]:
        return getattr(self.host, f"{self.prefix}{self.attention}")

    def interleaved(self, config: Any) -> bool:
        """Whether rope dims 2i and 2i + 1 are a pair."""
        layout = models.SERVED[self.model_type].layout(getattr(config, "rope_interleave", True))
        return layout == models.INTERLEAVED

    def query_scaling(self, config: Any) -> QueryScaling | None:
        """What queries are multiplied by, by their position; None: nothing."""
        if not models.SERVED[self.model_type].scales_queries:
            return None
        return QueryScaling.from_rope_parameters(config.rope_parameters)

    def parts_pairs(self, config: Any) -> bool:
        """Whether a stock cache holds the first rope dims of all pairs before the second ones.

        That is how the stock models rotate neighbours, except DeepseekV2, which does it in complex numbers.
        """
        return self.interleaved(config) and self.model_type != "deepseek_v2"


FAMILIES = (
    Family("axk1", "AXK1"),
    Family("deepseek_v2", "DeepseekV2"),
    Family("deepseek_v3", "DeepseekV3"),
    Family("deepseek_v32", "DeepseekV32"),
    Family("glm4_moe_lite", "Glm4MoeLite"),
    Family("glm_moe_dsa", "GlmMoeDsa", returns_choice=True),
    Family("longcat_flash", "LongcatFlash", "MLA"),
    Family("minicpm3", "MiniCPM3"),
    Family("mistral4", "Mistral4"),
    Family("youtu", "Youtu"),
)


def find_decoder(model: nn.Module) -> tuple[Any, Family]:
    """The decoder within a model (a language model, or the language model of one that also sees), and its family.

    Raises:
        TypeError: there is none, or more than one, or it is of a family that is not served, with the reason.
    """
    found = [(module, family) for module in model.modules() if (family := _family(module)) is not None]
    if len(found) == 1:
        return found[0]
    name = type(model).__name__
    if found:
        raise TypeError(f"model must have one decoder, and {name} has {len(found)}: enable each of them")
    for model_type in _model_types(model):
        reason = models.refusal(model_type)
        if reason is not None:
            raise TypeError(f"model must be one that enable serves, and {name} ({model_type}) is not: {reason}")
    # DeepSeek-V4's attention has a way of its own (``v4``).
    served = ", ".join((*(family.prefix for family in FAMILIES), "DeepseekV4"))
    raise TypeError(f"model must be a transformers model of one of the families {served}, got {name}")


def _family(module: nn.Module) -> Family | None:
    for family in FAMILIES:
        if family.module in sys.modules and isinstance(module, family.decoder_class):
            return family
    return None


def _model_types(model: nn.Module) -> Iterator[str]:
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        if isinstance(name := getattr(part, "model_type", None), str):
            yield name


def attentions(decoder: Any) -> list[tuple[int, Any]]:
    """The attention modules of a decoder, each with the number of its layer, in which there may be several."""
    found = []
    for index, layer in enumerate(decoder.layers):
        inner = layer.self_attn
        found += [(index, module) for module in (inner if isinstance(inner, nn.ModuleList) else (inner,))]
    return found


def cosines_and_sines(embeddings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [b or 1, queries, rope / 2] of the position embeddings that a decoder hands to its layers.

    DeepseekV2's are complex numbers; the others' hold each frequency twice, one half after the other.
    """
    if isinstance(embeddings, torch.Tensor):
        return embeddings.real, embeddings.imag
    cosine, sine = embeddings
    half = cosine.shape[-1] // 2
    return cosine[..., :half], sine[..., :half]
