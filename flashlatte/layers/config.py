"""Configuration of an MLA layer: its sizes, rotary embedding and indexer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flashlatte.kv_cache.fp8 import SCALE_ROUNDINGS
from flashlatte.kv_cache.index_formats import HEAD_DIMS
from flashlatte.layers import models
from flashlatte.layers.config_fields import check_fields, of_layer
from flashlatte.layers.rope_config import QueryScaling, Rope
from flashlatte.ops.index_logits import api as index_logits_api
from flashlatte.ops.topk import api as topk_api
from flashlatte.runtime import checks

# Sources of the output's factor: one for each head, one for each value dim, or the latter from the queries' projection.
OUTPUT_GATES = ("head", "channel", "query")
# Sizes that every config must define.
SIZES = ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Several times the largest sizes of any model. A larger one is a mistake, and a layer would allocate by it.
MAX_HIDDEN_SIZE, MAX_SIZE = 65536, 8192


def check_indexer_sizes(num_heads: int, head_dim: int, topk: int) -> None:
    """Raise TypeError or ValueError for sizes that the indexer's operations do not support."""
    checks.positive_int("num_heads", num_heads, maximum=index_logits_api.MAX_HEADS)
    checks.positive_int("head_dim", head_dim)
    checks.positive_int("topk", topk)
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim of an indexer must be 32, 64 or 128, got {head_dim!r}")
    if topk > topk_api.MAX_K:
        raise ValueError(f"topk of an indexer must be at most {topk_api.MAX_K}, got {topk}")


@dataclass(frozen=True)
class IndexerConfig:
    """A model's lightning indexer (DeepSeek-V3.2, arXiv:2512.02556, §2.1).

    Attributes:
        num_heads, head_dim: heads and head dim of the queries; at most 128 heads, head_dim is 32, 64 or 128.
        topk: maximum number of tokens that a query selects, at most 4,096.
        rope_layout: layout of the rotated dims of queries and keys, "half" (DeepSeek-V3.2) or "interleaved" (GLM-5).
        rope_last: whether the rotated dims are the last ones of a head (Hy4) instead of the first.
        norm_eps: epsilon of the keys' LayerNorm.
        hadamard: whether queries and keys are multiplied by a Hadamard matrix before quantization, as in DeepSeek's
            code. It changes scores by rounding only.
        scale_rounding: rounding of quantization scales: "exact", or "power_of_two" (DeepSeek's ue8m0).
        shared_layers: indices of layers without an indexer, which reuse the selection of the layer before.
    """

    num_heads: int = 64
    head_dim: int = 128
    topk: int = 2048
    rope_layout: str = models.HALF
    hadamard: bool = False
    scale_rounding: str = "exact"
    shared_layers: tuple[int, ...] = ()
    rope_last: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_indexer_sizes(self.num_heads, self.head_dim, self.topk)
        checks.choice("rope_layout", self.rope_layout, (models.INTERLEAVED, models.HALF))
        checks.choice("scale_rounding", self.scale_rounding, SCALE_ROUNDINGS)
        checks.flag("hadamard", self.hadamard)
        checks.flag("rope_last", self.rope_last)
        checks.epsilon("norm_eps", self.norm_eps)
        checks.instance("shared_layers", self.shared_layers, Sequence)
        for layer in self.shared_layers:
            if checks.integer("shared_layers", layer) < 1:
                raise ValueError(
                    f"shared_layers must be layer indices from 1 on: layer 0 has no layer before it, got {layer}"
                )


@dataclass(frozen=True)
class MLAConfig:
    """Sizes of an MLA layer (DeepSeek-V2, arXiv:2405.04434, §2.1), with transformers' field names.

    Attributes:
        hidden_size: width of the model.
        num_attention_heads: query heads of the whole layer.
        kv_lora_rank: width of the latent.
        qk_nope_head_dim, qk_rope_head_dim: widths of the unrotated and rotated parts of a head's query and key. The
            latter may be 0: all of a key is then expanded from the latent (GLM-5.3-Flash).
        v_head_dim: width of a head's value.
        q_lora_rank: width of the query's latent; None: queries are projected from hidden states directly.
        rope: the rotary embedding.
        norm_eps: epsilon of the RMSNorms of latents and of keys' rope dims.
        attention_bias: whether q_a_proj, kv_a_proj_with_mqa and o_proj have a bias.
        query_factor, latent_factor: factors of queries, and of normalized latents (LongCat-Flash).
        query_scaling: position-dependent factor of queries; None: none.
        indexer: selects the tokens that a query attends to; None: a query attends to all tokens up to its own.
            ``MLAAttention``'s needs a q_lora_rank.
        output_gate: attention's output o [h, v] of a token is multiplied by a sigmoid before ``o_proj``. None: it is
            not. With hidden states x, "head": o[i] · σ(g_proj(x)[i]) (Ling 3.0, dots3-note); "channel": o ·
            σ(gate_proj(x)) (Hy4). "query": o · σ(g), where (q, g) = q_gate_proj((norm(c), c)) replaces q_b_proj, with
            the query's latent c = q_a_proj(x) and nope + rope + v dims for each head (A.X-K2).
        attn_sink: whether head i has a learned logit ``sinks[i]`` in its softmax's denominator, e^lse + e^sink (Hy4).
        window: a query at position p attends to positions p - window + 1 to p (dots3-note); None: to all up to p.
        key_rope_norm: whether an RMSNorm, ``k_rope_only_layernorm``, precedes the rotation of keys' rope dims
            (dots3-note).
    """

    hidden_size: int
    num_attention_heads: int
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    q_lora_rank: int | None = None
    rope: Rope = field(default_factory=Rope)
    norm_eps: float = 1e-6
    attention_bias: bool = False
    query_factor: float = 1.0
    latent_factor: float = 1.0
    query_scaling: QueryScaling | None = None
    indexer: IndexerConfig | None = None
    output_gate: str | None = None
    attn_sink: bool = False
    key_rope_norm: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        for name in SIZES:
            if name != "qk_rope_head_dim":
                maximum = MAX_HIDDEN_SIZE if name == "hidden_size" else MAX_SIZE
                checks.positive_int(name, getattr(self, name), maximum=maximum)
        checks.positive_int("qk_rope_head_dim", self.qk_rope_head_dim, or_zero=True, maximum=MAX_SIZE)
        if self.q_lora_rank is not None:
            checks.positive_int("q_lora_rank", self.q_lora_rank, maximum=MAX_SIZE)
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even, got {self.qk_rope_head_dim}")
        checks.instance("rope", self.rope, Rope)
        checks.instance("query_scaling", self.query_scaling, QueryScaling, or_none=True)
        checks.instance("indexer", self.indexer, IndexerConfig, or_none=True)
        checks.flag("attention_bias", self.attention_bias)
        if self.output_gate is not None:
            checks.choice("output_gate", self.output_gate, OUTPUT_GATES)
        if self.output_gate == "query" and self.q_lora_rank is None:
            raise ValueError("q_lora_rank must be set in a config with output_gate 'query', got None")
        checks.flag("attn_sink", self.attn_sink)
        if checks.flag("key_rope_norm", self.key_rope_norm) and self.qk_rope_head_dim == 0:
            raise ValueError("key_rope_norm needs rope dims, got qk_rope_head_dim 0")
        if self.window is not None:
            checks.positive_int("window", self.window)
            if self.indexer is not None:
                raise ValueError(f"window must be None in a config with an indexer, got {self.window}")
        checks.epsilon("norm_eps", self.norm_eps)
        for name in ("query_factor", "latent_factor"):
            checks.positive_number(name, getattr(self, name))
        if self.indexer is not None and self.qk_rope_head_dim > self.indexer.head_dim:
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
        """qk_head_dim^-0.5 times YaRN's factor, without ``query_factor``."""
        scale = self.qk_head_dim**-0.5
        return scale if self.rope.yarn is None else scale * self.rope.yarn.softmax_factor

    @staticmethod
    def layers(config: Any) -> tuple[MLAConfig, ...]:
        """``from_transformers`` for every layer of a model; layers of other kinds have the config of the MLA layers.

        Raises:
            TypeError, ValueError: as ``from_transformers``; no ``num_hidden_layers``.
        """
        fields = models.text_config(models.config_fields(config))
        count = models.num_layers(fields)
        if fields.get("model_type") is not None and models.traits(fields["model_type"]).has_layers:
            if len(models.list_of(fields, "layer_types")) < count:
                raise ValueError(f"layer_types must have an entry for each of num_hidden_layers {count}")
            return tuple(MLAConfig.from_transformers(config, layer) for layer in range(count))
        return (MLAConfig.from_transformers(config),) * count

    @staticmethod
    def from_transformers(config: Any, layer: int | None = None) -> MLAConfig:
        """Read the config of a transformers model, or the content of a checkpoint's ``config.json`` as a mapping.

        For a model with other layers between those of MLA (Ling 3.0, Kimi Linear), it describes its MLA layers.

        The rotary embedding is read as transformers reads it (``standardize_rope_params``).

        Args:
            layer: index of the layer, for a family whose layers differ (dots3-note).

        Raises:
            TypeError: a field of another type, such as a ``max_position_embeddings`` of None.
            ValueError: no ``kv_lora_rank`` (the attention is not MLA); a missing size; an unsupported or unknown
                family; a rope_type other than "default" and "yarn"; a field about attention that is unknown.
        """
        whole = models.config_fields(config)
        fields = models.text_config(whole)
        models.check_described(whole.get("model_type"), fields.get("model_type"))
        if fields.get("kv_lora_rank") is None:
            raise ValueError(f"config must be an MLA model's, with kv_lora_rank, got model_type {_model_type(fields)}")
        traits = models.traits(fields.get("model_type"))
        fields = of_layer(fields, layer) if traits.has_layers else fields
        missing = [name for name in SIZES if fields.get(name) is None]
        if missing:
            raise ValueError(f"config must have {', '.join(missing)}, got model_type {_model_type(fields)} without")
        rope = _rope_parameters(fields, traits)
        check_fields(fields, traits)
        with checks.naming(norm_eps="rms_norm_eps", window="sliding_window"):
            return MLAConfig(
                **{name: fields[name] for name in SIZES},
                q_lora_rank=fields.get("q_lora_rank"),
                rope=_rope(fields, rope, traits),
                norm_eps=fields.get("rms_norm_eps", 1e-6) if traits.model_eps else 1e-6,
                attention_bias=fields.get("attention_bias") or False,
                query_factor=_latent_factor(fields, "q_lora_rank") if traits.scales_latents else 1.0,
                latent_factor=_latent_factor(fields, "kv_lora_rank") if traits.scales_latents else 1.0,
                query_scaling=QueryScaling.from_rope_parameters(rope) if traits.scales_queries else None,
                indexer=indexer_config(fields, traits) if _has_indexer(fields, traits) else None,
                output_gate=traits.output_gate,
                attn_sink=traits.attn_sink,
                key_rope_norm=traits.key_rope_norm,
                window=fields["sliding_window"] if traits.has_layers else None,
            )


def _model_type(fields: Mapping[str, Any]) -> Any:
    return fields.get("model_type", "(none)")


def _has_indexer(fields: Mapping[str, Any], traits: models.Traits) -> bool:
    # In a family whose layers differ, ``of_layer`` has left the layer's own type.
    return traits.has_indexer and not (traits.has_layers and "indexed_attention" not in fields["layer_types"])


def _latent_factor(fields: Mapping[str, Any], rank: str) -> float:
    """√(hidden_size / rank); 1 if the model has no such latent."""
    if not fields.get(rank):
        return 1.0
    return (checks.positive_int("hidden_size", fields["hidden_size"]) / checks.positive_int(rank, fields[rank])) ** 0.5


def indexer_config(fields: Mapping[str, Any], traits: models.Traits) -> IndexerConfig:
    """The indexer of a family that has one.

    Raises:
        ValueError: a missing or unsupported size.
    """
    names = {"num_heads": "index_n_heads", "head_dim": "index_head_dim", "topk": "index_topk"}
    missing = [name for name in names.values() if fields.get(name) is None]
    if missing:
        raise ValueError(f"config must have {', '.join(missing)}, got model_type {_model_type(fields)} without")
    quantization = models.sub_config(fields, "quantization_config")
    shared_layers = models.shared_selection_layers(fields, traits.index_frequency)
    with checks.naming(norm_eps="rms_norm_eps", **names):
        return IndexerConfig(
            **{ours: fields[theirs] for ours, theirs in names.items()},
            rope_layout=traits.index_rope_layout,
            rope_last=traits.index_rope_last,
            norm_eps=fields.get("rms_norm_eps", 1e-6) if traits.index_model_eps else 1e-6,
            scale_rounding="power_of_two" if quantization.get("scale_fmt") == "ue8m0" else "exact",
            shared_layers=shared_layers,
        )


def _rope_parameters(fields: Mapping[str, Any], traits: models.Traits) -> dict[str, Any]:
    """``rope_parameters`` as transformers' modules read them."""
    name = "original_max_position_embeddings"
    parameters = models.rope_parameters(fields)
    if name in fields:
        # The top-level field takes precedence over the one in rope_parameters.
        parameters = {**parameters, name: fields[name]}
    return models.standardized_rope(
        parameters,
        fields.get("rope_theta", traits.rope_theta),
        fields.get("max_position_embeddings", traits.max_position),
    )


def _rope(fields: Mapping[str, Any], parameters: Mapping[str, Any], traits: models.Traits) -> Rope:
    """The rotary embedding of a config with these standardized ``rope_parameters``."""
    layout, positions = traits.layout(fields.get("rope_interleave", True)), traits.max_position
    rope = Rope.from_rope_parameters(parameters, layout, max_position_embeddings(fields, positions))
    if rope.yarn is None or traits.yarn_scales_softmax:
        return rope
    return replace(rope, yarn=rope.yarn.of_rotation())


def max_position_embeddings(fields: Mapping[str, Any], default: int) -> int:
    """The validated field of a config, or ``default``."""
    # Kimi Linear's and Ling 3.0's checkpoints name it model_max_length.
    found = fields.get("max_position_embeddings", fields.get("model_max_length", default))
    return checks.positive_int("max_position_embeddings", found)
