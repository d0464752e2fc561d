"""What a model's MLA layer is made of: its sizes and its rotary embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashlatte.kv_cache.fp8 import SCALE_ROUNDINGS
from flashlatte.kv_cache.index_formats import HEAD_DIMS
from flashlatte.layers import models
from flashlatte.ops.topk.api import MAX_K
from flashlatte.runtime import checks

if TYPE_CHECKING:
    import torch

LAYOUTS = (models.INTERLEAVED, models.HALF)
# The sizes that every model has.
_SIZES = (
    "hidden_size",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv:2309.00071) as DeepSeek and transformers compute it.

    Attributes:
        factor: by which the context is longer than the original one.
        original_max_position: the context the model was trained on first.
        beta_fast, beta_slow: rotations over the original context between which a frequency is blended.
        mscale, mscale_all_dim: cos and sin are scaled by the quotient of get_mscale of the two, and the softmax
            scale by the square of get_mscale(factor, mscale_all_dim).
        attention_factor: the scale of cos and sin, if given; else from mscale and mscale_all_dim.
        truncate: whether the blended range of frequencies ends at whole dims.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        checks.positive_int("original_max_position", self.original_max_position)
        for name in ("factor", "beta_fast", "beta_slow"):
            checks.positive_number(name, getattr(self, name))
        for name in ("mscale", "mscale_all_dim"):
            checks.finite(name, getattr(self, name))
        if self.attention_factor is not None:
            checks.positive_number("attention_factor", self.attention_factor)
        checks.flag("truncate", self.truncate)

    @classmethod
    def from_rope_parameters(cls, parameters: Mapping[str, Any], max_position: int) -> Yarn:
        """Of standardised ``rope_parameters``; a factor of None is that of ``max_position`` to the original length.

        Raises:
            TypeError, ValueError: a field is not a number in its range.
        """
        name = "original_max_position_embeddings"
        original = checks.positive_int(name, parameters[name])
        factor = parameters.get("factor")
        return cls(
            factor=max_position / original if factor is None else checks.number("factor", factor),
            original_max_position=original,
            beta_fast=parameters.get("beta_fast") or 32.0,
            beta_slow=parameters.get("beta_slow") or 1.0,
            mscale=parameters.get("mscale") or 0.0,
            mscale_all_dim=parameters.get("mscale_all_dim") or 0.0,
            attention_factor=parameters.get("attention_factor"),
            truncate=parameters.get("truncate", True),
        )

    @property
    def rotation_scale(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return get_mscale(self.factor, self.mscale) / get_mscale(self.factor, self.mscale_all_dim)
        return get_mscale(self.factor, 1.0)

    @property
    def softmax_factor(self) -> float:
        """What the softmax scale is multiplied by."""
        return get_mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def get_mscale(factor: float, mscale: float) -> float:
    """0.1 · mscale · ln(factor) + 1, and 1 for a factor up to 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class Rope:
    """A rotary embedding.

    Attributes:
        theta: base of the frequencies.
        layout: which dims a frequency turns: "interleaved" 2i and 2i + 1, "half" i and i + dim / 2.
        max_position: positions 0 to max_position - 1 can be rotated.
        yarn: extension of the context, or None.
    """

    theta: float = 10000.0
    layout: str = "interleaved"
    max_position: int = 4096
    yarn: Yarn | None = None

    def __post_init__(self) -> None:
        checks.choice("layout", self.layout, LAYOUTS)
        checks.positive_int("max_position", self.max_position)
        checks.instance("yarn", self.yarn, Yarn, or_none=True)
        if not 1 < checks.number("theta", self.theta) < math.inf:
            raise ValueError(f"theta must be a finite number above 1, got {self.theta}")

    @classmethod
    def from_rope_parameters(cls, parameters: Mapping[str, Any], layout: str, max_position: int) -> Rope:
        """Of standardised ``rope_parameters`` (``models.standardised_rope``).

        Raises:
            TypeError, ValueError: a field is not a number in its range.
        """
        return cls(
            theta=checks.number("rope_theta", parameters["rope_theta"]),
            layout=layout,
            max_position=max_position,
            yarn=Yarn.from_rope_parameters(parameters, max_position) if parameters["rope_type"] == "yarn" else None,
        )


def check_indexer_sizes(num_heads: int, head_dim: int, topk: int) -> None:
    """Raise TypeError, ValueError for what the indexer's operations do not take."""
    for name, size in (("num_heads", num_heads), ("head_dim", head_dim), ("topk", topk)):
        checks.positive_int(name, size)
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim of an indexer must be 32, 64 or 128, got {head_dim!r}")
    if topk > MAX_K:
        raise ValueError(f"topk of an indexer must be at most {MAX_K}, got {topk}")


@dataclass(frozen=True)
class IndexerConfig:
    """A model's lightning indexer (DeepSeek-V3.2, arXiv:2512.02556, §2.1).

    Attributes:
        num_heads, head_dim: of its queries; head_dim 32, 64 or 128.
        topk: tokens that a query selects at most; at most 4,096.
        rope_layout: of the first dims of queries and keys, "half" (DeepSeek-V3.2) or "interleaved" (GLM-5).
        hadamard: whether queries and keys are multiplied by a Hadamard matrix before they are rounded, as in DeepSeek's
            own code. Scores are the same but for rounding.
        scale_rounding: of the scales of quantised queries and keys: "exact", or "power_of_two" (DeepSeek's ue8m0).
        shared_layers: the numbers of layers without an indexer, which attend to what the layer before them selected.
    """

    num_heads: int = 64
    head_dim: int = 128
    topk: int = 2048
    rope_layout: str = models.HALF
    hadamard: bool = False
    scale_rounding: str = "exact"
    shared_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_indexer_sizes(self.num_heads, self.head_dim, self.topk)
        checks.choice("rope_layout", self.rope_layout, LAYOUTS)
        checks.choice("scale_rounding", self.scale_rounding, SCALE_ROUNDINGS)
        checks.flag("hadamard", self.hadamard)
        checks.instance("shared_layers", self.shared_layers, Sequence)
        for layer in self.shared_layers:
            if checks.integer("shared_layers", layer) < 1:
                raise ValueError(
                    f"shared_layers must be numbers from 1 on, since no layer is before the first, got {layer}"
                )


@dataclass(frozen=True)
class QueryScaling:
    """Queries at position p are multiplied by 1 + beta · log(1 + ⌊p / original_max_position⌋) (Llama 4, Mistral 4).

    Attributes:
        beta: 0 or above.
        original_max_position: positions whose factor is 1.
    """

    beta: float
    original_max_position: int

    def __post_init__(self) -> None:
        if checks.number("beta", self.beta) < 0 or not math.isfinite(self.beta):
            raise ValueError(f"beta must be a finite number from 0, got {self.beta}")
        checks.positive_int("original_max_position", self.original_max_position)

    def factors(self, positions: torch.Tensor) -> torch.Tensor:
        """float32, of int positions [...]."""
        # A quotient of ints, and a logarithm of one, would be of the default dtype: bf16 has no 8191 / 8192.
        return 1 + self.beta * (1 + positions // self.original_max_position).float().log()

    @classmethod
    def from_rope_parameters(cls, rope: Mapping[str, Any]) -> QueryScaling:
        """Of ``rope_parameters`` in a transformers config.

        Raises:
            ValueError: one of the two numbers is missing.
        """
        names = "llama_4_scaling_beta", "original_max_position_embeddings"
        if missing := [name for name in names if rope.get(name) is None]:
            raise ValueError(f"rope_parameters must have {', '.join(missing)}, got {dict(rope)}")
        return cls(*(rope[name] for name in names))


@dataclass(frozen=True)
class MLAConfig:
    """Sizes of an MLA layer (DeepSeek-V2, arXiv:2405.04434, §2.1), under the names that transformers gives them.

    Attributes:
        hidden_size: width of the model.
        num_attention_heads: query heads, of the whole layer.
        kv_lora_rank: width of the latent.
        qk_nope_head_dim, qk_rope_head_dim: the two parts of a head's query and key.
        v_head_dim: width of a head's value.
        q_lora_rank: width of the query's latent; None if the query is projected at once.
        rope: the rotary embedding.
        norm_eps: of the two RMSNorms.
        attention_bias: whether q_a_proj, kv_a_proj_with_mqa and o_proj have a bias.
        query_factor, latent_factor: what queries, and latents once normalised, are multiplied by (LongCat-Flash).
        query_scaling: what queries are multiplied by besides, by their position; None: nothing.
        indexer: selects the tokens that a query attends to; None: all up to its own.
    """

    hidden_size: int
    num_attention_heads: int
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    q_lora_rank: int | None = None
    rope: Rope = Rope()
    norm_eps: float = 1e-6
    attention_bias: bool = False
    query_factor: float = 1.0
    latent_factor: float = 1.0
    query_scaling: QueryScaling | None = None
    indexer: IndexerConfig | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            checks.positive_int(name, getattr(self, name))
        if self.q_lora_rank is not None:
            checks.positive_int("q_lora_rank", self.q_lora_rank)
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even, got {self.qk_rope_head_dim}")
        checks.instance("rope", self.rope, Rope)
        checks.instance("query_scaling", self.query_scaling, QueryScaling, or_none=True)
        checks.instance("indexer", self.indexer, IndexerConfig, or_none=True)
        checks.flag("attention_bias", self.attention_bias)
        checks.epsilon("norm_eps", self.norm_eps)
        for name in ("query_factor", "latent_factor"):
            checks.positive_number(name, getattr(self, name))
        if self.indexer is not None:
            if self.q_lora_rank is None:
                raise ValueError("q_lora_rank must be given beside an indexer, whose queries come from it, got None")
            if self.qk_rope_head_dim > self.indexer.head_dim:
                raise ValueError(
                    f"qk_rope_head_dim must be at most the indexer's head_dim {self.indexer.head_dim}, "
                    f"got {self.qk_rope_head_dim}"
                )

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def head_dim(self) -> int:
        """Width of a cache row: latent and rope."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """qk_head_dim^-0.5 times YaRN's factor; ``query_factor`` multiplies queries, or scores, besides."""
        scale = self.qk_head_dim**-0.5
        return scale if self.rope.yarn is None else scale * self.rope.yarn.softmax_factor

    @staticmethod
    def from_transformers(config: Any) -> MLAConfig:
        """The config of a transformers model, or the content of a checkpoint's ``config.json`` as a mapping.

        The rotary embedding is the one that transformers makes of the config (its ``standardize_rope_params``).

        Raises:
            TypeError: a field of another type, such as a ``max_position_embeddings`` of None.
            ValueError: no ``kv_lora_rank`` (another attention); a size that is missing; a family that is refused, with
                the reason, or whose attention is not known to be this one; a rope_type other than "default" and "yarn".
        """
        whole = models.fields_of(config)
        fields = models.text_config(whole)
        models.check_not_refused(whole.get("model_type"), fields.get("model_type"))
        if fields.get("kv_lora_rank") is None:
            raise ValueError(f"config must be an MLA model's, with kv_lora_rank, got model_type {_model_type(fields)}")
        traits = models.traits(fields.get("model_type"))
        missing = [name for name in _SIZES if fields.get(name) is None]
        if missing:
            raise ValueError(f"config must have {', '.join(missing)}, got model_type {_model_type(fields)} without")
        rope = _rope_parameters(fields, traits)
        max_position = max_position_embeddings(fields, traits.max_position)
        return MLAConfig(
            **{name: fields[name] for name in _SIZES},
            q_lora_rank=fields.get("q_lora_rank"),
            rope=Rope.from_rope_parameters(rope, traits.layout(fields.get("rope_interleave", True)), max_position),
            attention_bias=fields.get("attention_bias") or False,
            query_factor=_latent_factor(fields, "q_lora_rank") if traits.scales_latents else 1.0,
            latent_factor=_latent_factor(fields, "kv_lora_rank") if traits.scales_latents else 1.0,
            query_scaling=QueryScaling.from_rope_parameters(rope) if traits.scales_queries else None,
            indexer=_indexer(fields, traits) if traits.has_indexer else None,
        )


def _model_type(fields: Mapping[str, Any]) -> Any:
    return fields.get("model_type", "(none)")


def _latent_factor(fields: Mapping[str, Any], rank: str) -> float:
    """√(hidden_size / rank), and 1 where there is no such latent."""
    return (fields["hidden_size"] / fields[rank]) ** 0.5 if fields.get(rank) else 1.0


def _indexer(fields: Mapping[str, Any], traits: models.Traits) -> IndexerConfig:
    names = {"num_heads": "index_n_heads", "head_dim": "index_head_dim", "topk": "index_topk"}
    missing = [name for name in names.values() if fields.get(name) is None]
    if missing:
        raise ValueError(f"config must have {', '.join(missing)}, got model_type {_model_type(fields)} without")
    quantization = models.inner(fields, "quantization_config")
    return IndexerConfig(
        **{ours: fields[theirs] for ours, theirs in names.items()},
        rope_layout=traits.index_rope_layout,
        scale_rounding="power_of_two" if quantization.get("scale_fmt") == "ue8m0" else "exact",
        shared_layers=models.shared_selections(fields),
    )


def _rope_parameters(fields: Mapping[str, Any], traits: models.Traits) -> dict[str, Any]:
    """``rope_parameters`` as transformers' modules read them, after a model is made of the config."""
    name = "original_max_position_embeddings"
    parameters = models.rope_parameters(fields)
    if name in fields:
        # A length beside rope_parameters takes precedence over one within.
        parameters = {**parameters, name: fields[name]}
    return models.standardised_rope(
        parameters,
        fields.get("rope_theta", traits.rope_theta),
        fields.get("max_position_embeddings", traits.max_position),
    )


def max_position_embeddings(fields: Mapping[str, Any], default: int) -> int:
    """The field of a config, checked; ``default`` where there is none."""
    return checks.positive_int("max_position_embeddings", fields.get("max_position_embeddings", default))
