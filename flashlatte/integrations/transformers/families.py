"""The transformers model families that ``enable`` supports. Importing this imports no model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flashlatte.layers import models
from flashlatte.layers.rope_config import QueryScaling


@dataclass(frozen=True)
class Family:
    """A package of ``transformers.models`` with one decoder and one attention class.

    Attributes:
        model_type: name of the package, and of the family in ``flashlatte.layers.models``.
        prefix: prefix of the class names.
        attention, decoder: names of the attention and decoder classes after the prefix.
        linear: name, after the prefix, of the class of linear attention in the layers that transformers computes; None:
            all layers are MLA.
        selects_columns: whether the model's own indexer selects columns, which are translated to slots.
        keeps_pairs: whether a stock cache stores the two rope dims of a pair next to each other, if they are so in the
            projection. Others store the first dims of all pairs before the second ones.
        returns_selection: whether attention returns the indexer's selection, for layers that share it, as third result.
        training_refusal: why ``layers.training`` cannot compute its attention; None if it can.
    """

    model_type: str
    prefix: str
    attention: str = "Attention"
    decoder: str = "Model"
    linear: str | None = None
    selects_columns: bool = False
    keeps_pairs: bool = False
    returns_selection: bool = False
    training_refusal: str | None = None

    @property
    def module(self) -> str:
        return f"transformers.models.{self.model_type}.modeling_{self.model_type}"

    @property
    def host(self) -> Any:
        """The module that defines the classes; it is imported if an instance of one exists."""
        return sys.modules[self.module]

    @property
    def decoder_class(self) -> type[nn.Module]:
        return getattr(self.host, f"{self.prefix}{self.decoder}")

    @property
    def attention_class(self) -> type[nn.Module]:
        return getattr(self.host, f"{self.prefix}{self.attention}")

    def is_linear(self, module: nn.Module) -> bool:
        """Whether a layer's attention is linear attention, with states instead of a history."""
        return self.linear is not None and type(module) is getattr(self.host, f"{self.prefix}{self.linear}")

    @property
    def default_implementation(self) -> str:
        """The attention implementation that transformers chooses if none is given."""
        return "sdpa" if getattr(self.decoder_class, "_supports_sdpa", True) else "eager"

    def interleaved(self, config: Any) -> bool:
        """Whether rope dims 2i and 2i + 1 form a pair."""
        return self._layout(config) == models.INTERLEAVED

    def rotates(self, module: Any) -> bool:
        """Whether a layer's queries and keys are rotated."""
        return module.qk_rope_head_dim > 0 and self._layout(module.config) != models.UNROTATED

    def _layout(self, config: Any) -> str:
        return models.SUPPORTED[self.model_type].layout(getattr(config, "rope_interleave", True))

    def query_scaling(self, config: Any) -> QueryScaling | None:
        """Position-dependent factor of queries; None if the family has none."""
        if not models.SUPPORTED[self.model_type].scales_queries:
            return None
        return QueryScaling.from_rope_parameters(config.rope_parameters)

    def splits_pairs(self, config: Any) -> bool:
        """Whether a stock cache stores the first rope dims of all pairs before the second ones."""
        return self.interleaved(config) and not self.keeps_pairs


FAMILIES = (
    Family("axk1", "AXK1"),
    Family("axk2", "AXK2"),
    Family("bailing_hybrid", "BailingHybrid", linear="DeltaAttention"),
    Family("deepseek_v2", "DeepseekV2", keeps_pairs=True),
    Family("deepseek_v3", "DeepseekV3"),
    Family("deepseek_v32", "DeepseekV32"),
    Family("dots3_note", "Dots3Note", "TextAttention", "TextModel"),
    Family(
        *("glm5_next", "Glm5Next", "TextAttention", "TextModel", "TextLinearAttention"),
        selects_columns=True,
        returns_selection=True,
        training_refusal="its indexer selects pools of tokens",
    ),
    Family("glm4_moe_lite", "Glm4MoeLite"),
    Family("glm_moe_dsa", "GlmMoeDsa", returns_selection=True),
    Family("hy_v4", "HYV4", returns_selection=True),
    Family("hy_v4_vl", "HYV4VL", decoder="TextModel", keeps_pairs=True, returns_selection=True),
    Family("kimi_linear", "KimiLinear", linear="DeltaAttention"),
    Family("longcat_flash", "LongcatFlash", "MLA"),
    Family("minicpm3", "MiniCPM3"),
    Family(*("mistral_large4", "MistralLarge4", "TextAttention", "TextModel"), returns_selection=True),
    Family("mistral4", "Mistral4"),
    Family("youtu", "Youtu"),
)


def find_decoder(model: nn.Module) -> tuple[Any, Family]:
    """The decoder of a language model, or of a multimodal model's language model, and its family.

    Raises:
        TypeError: no decoder, several, or one of an unsupported family.
    """
    found = [(module, family) for module in model.modules() if (family := _family(module)) is not None]
    if len(found) == 1:
        return found[0]
    name = type(model).__name__
    if found:
        raise TypeError(f"model must have one decoder, got {name} with {len(found)}: enable each of them")
    # DeepSeek-V4 is handled separately (``v4``).
    served = ", ".join((*(family.prefix for family in FAMILIES), "DeepseekV4"))
    raise TypeError(f"model must be a transformers model of one of the families {served}, got {name}")


def _family(module: nn.Module) -> Family | None:
    for family in FAMILIES:
        if family.module in sys.modules and isinstance(module, family.decoder_class):
            return family
    return None


def attentions(decoder: Any, family: Family) -> list[tuple[int, Any]]:
    """The attention modules of a decoder with their layer index, except linear attention; a layer may have several."""
    found = []
    for index, layer in enumerate(decoder.layers):
        inner = layer.self_attn
        found += [(index, module) for module in (inner if isinstance(inner, nn.ModuleList) else (inner,))]
    return [(index, module) for index, module in found if not family.is_linear(module)]


def linear_layers(decoder: Any, family: Family) -> list[int]:
    """Indices of the layers with linear attention."""
    return [index for index, layer in enumerate(decoder.layers) if family.is_linear(layer.self_attn)]


def check_selections(modules: list[Any], family: Family) -> None:
    """Raise ValueError for layers that attend to every token in a model whose other layers select tokens.

    A step is planned for one of the two; layers with a window use neither.
    """
    kinds = {
        getattr(module, "indexer", None) is not None
        for module in modules
        if getattr(module, "sliding_window", None) is None
    }
    if len(kinds) > 1 and not family.returns_selection:
        raise ValueError("layer_types must not have both indexed_attention and full_attention, got both")


def split_pairs(rope: torch.Tensor) -> torch.Tensor:
    """Reorder rope dims [..., d] of pairs (2i, 2i + 1): the first dims of all pairs, then the second ones."""
    return rope.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def join_pairs(rope: torch.Tensor) -> torch.Tensor:
    """The inverse of ``split_pairs``."""
    return rope.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def cosines_and_sines(embeddings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [b or 1, queries, rope / 2] of the position embeddings that a decoder passes to its layers.

    DeepseekV2's are complex numbers; those of other families repeat each frequency in the second half.
    """
    if isinstance(embeddings, torch.Tensor):
        return embeddings.real, embeddings.imag
    cosine, sine = embeddings
    half = cosine.shape[-1] // 2
    return cosine[..., :half], sine[..., :half]
