"""Configuration of a DeepSeek-V4 attention layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flashlatte.layers import models
from flashlatte.layers.config import MAX_HIDDEN_SIZE, MAX_SIZE, check_indexer_sizes, max_position_embeddings
from flashlatte.layers.rope_config import Rope
from flashlatte.runtime import checks

MODEL_TYPE = "deepseek_v4"
# transformers' names of layers with a window only, with selected groups, and with all groups.
SLIDING, SELECTING, COMPRESSING = _KINDS = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)


@dataclass(frozen=True)
class V4IndexerConfig:
    """The indexer of a layer, which selects the groups that a query attends to.

    Attributes:
        num_heads, head_dim: heads and head dim of its queries; at most 128 heads, head_dim is 32, 64 or 128.
        topk: maximum number of groups that a query selects, at most 4,096.
    """

    num_heads: int = 64
    head_dim: int = 128
    topk: int = 512

    def __post_init__(self) -> None:
        check_indexer_sizes(self.num_heads, self.head_dim, self.topk)


@dataclass(frozen=True)
class V4Config:
    """One layer. The defaults are DeepSeek-V4-Flash's layers with groups of 4 tokens, for 4,096 positions.

    Attributes:
        hidden_size, q_lora_rank: widths of hidden states, and of the query's latent.
        num_attention_heads, head_dim, rope_dim: heads, head dim and rotated dims of queries. There is one key head,
            which is also the value. Its last rope_dim elements are rotated in pairs (2i, 2i + 1).
        o_groups, o_lora_rank: the output projection maps each of o_groups groups of heads to o_lora_rank elements.
        window: tokens of the sliding window, the query's own included.
        ratio: tokens of a compressed group; 0 in a layer with a window only.
        indexer: selects groups. With an indexer, groups overlap: a row is computed from its group and the one before.
            Without one, a query attends to all groups.
        rope: rotary embedding of queries, keys and groups.
        rms_norm_eps: epsilon of all norms.
        normalizes_heads: whether each head of the queries is normalized, without a weight.
    """

    normalizes_heads: ClassVar[bool] = True

    hidden_size: int = 4096
    q_lora_rank: int = 1024
    num_attention_heads: int = 64
    head_dim: int = 512
    rope_dim: int = 64
    o_groups: int = 8
    o_lora_rank: int = 1024
    window: int = 128
    ratio: int = 4
    indexer: V4IndexerConfig | None = field(default_factory=V4IndexerConfig)
    rope: Rope = field(default_factory=lambda: Rope(theta=160000.0))
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        checks.positive_int("hidden_size", self.hidden_size, maximum=MAX_HIDDEN_SIZE)
        for name in ("q_lora_rank", "num_attention_heads", "head_dim", "o_groups", "o_lora_rank", "window"):
            checks.positive_int(name, getattr(self, name), maximum=MAX_SIZE)
        checks.positive_int("ratio", self.ratio, or_zero=True, maximum=MAX_SIZE)
        checks.epsilon("rms_norm_eps", self.rms_norm_eps)
        checks.instance("indexer", self.indexer, V4IndexerConfig, or_none=True)
        checks.instance("rope", self.rope, Rope)
        if checks.positive_int("rope_dim", self.rope_dim) % 2 or self.rope_dim > self.head_dim:
            raise ValueError(f"rope_dim must be even and at most head_dim {self.head_dim}, got {self.rope_dim}")
        if self.num_attention_heads % self.o_groups:
            raise ValueError(f"o_groups must divide {self.num_attention_heads} heads, got {self.o_groups}")
        if self.indexer is not None and self.ratio == 0:
            raise ValueError("indexer must be None in a layer with ratio 0, which has no groups to select")
        if self.indexer is not None and self.indexer.head_dim < self.rope_dim:
            raise ValueError(f"indexer.head_dim must be at least rope_dim {self.rope_dim}, got {self.indexer.head_dim}")
        if self.rope.layout != "interleaved":
            raise ValueError(f"rope.layout must be 'interleaved', got {self.rope.layout!r}")

    @property
    def overlap(self) -> int:
        """Number of previous groups that contribute to a row."""
        return 0 if self.indexer is None else 1

    @property
    def stores_groups(self) -> bool:
        """Whether the layer compresses tokens to groups and stores them."""
        return self.ratio > 0

    @property
    def selects_groups(self) -> bool:
        """Whether the layer has an indexer that selects groups."""
        return self.indexer is not None

    @property
    def state_dim(self) -> int:
        """Elements of a token's state in an unfinished group; 0 in a layer without states."""
        return 2 * (1 + self.overlap) * self.head_dim if self.ratio else 0

    @property
    def index_state_dim(self) -> int:
        """Elements of a token's state in an unfinished index key; 0 in a layer without these states."""
        return 0 if self.indexer is None else 2 * (1 + self.overlap) * self.indexer.head_dim

    @classmethod
    def from_transformers(cls, config: Any, layer: int) -> V4Config:
        """The configuration of one layer; ``config`` as for ``layers``.

        Raises:
            ValueError: as ``layers``.
        """
        return cls.layers(config)[layer]

    @classmethod
    def layers(cls, config: Any) -> tuple[V4Config, ...]:
        """All layers of a transformers ``DeepseekV4Config``, or of a checkpoint's ``config.json`` as a mapping.

        Raises:
            TypeError, ValueError: not a config; another model; missing sizes; an unknown layer type or rope_type.
        """
        fields = models.config_fields(config)
        if fields.get("model_type") != MODEL_TYPE:
            raise ValueError(f"model_type must be {MODEL_TYPE!r}, got {fields.get('model_type')!r}")
        shared, indexer = common_fields(fields, MODEL_TYPE)
        kinds, ratios, ropes = _kinds(fields), _ratios(fields), layer_ropes(fields)

        def layer(kind: str) -> V4Config:
            sliding, selects = kind == SLIDING, kind == SELECTING
            with config_names(fields):
                return cls(
                    **shared,
                    ratio=0 if sliding else ratios[kind],
                    indexer=indexer if selects else None,
                    rope=ropes["main" if sliding else "compress"],
                )

        return tuple(layer(kind) for kind in kinds)


_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "q_lora_rank",
    "num_attention_heads",
    "head_dim",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
)
_INDEXER_SIZES = ("index_n_heads", "index_head_dim", "index_topk")


def config_names(fields: Mapping[str, Any]) -> checks.naming:
    """Names the fields of a model's config in the errors of ``V4Config``."""
    rope_dim = "qk_rope_head_dim" if _reads_rope_dim(fields) else "partial_rotary_factor times head_dim"
    return checks.naming(window="sliding_window", rope_dim=rope_dim)


def common_fields(fields: Mapping[str, Any], model_type: str) -> tuple[dict[str, Any], V4IndexerConfig]:
    """The arguments of ``V4Config`` that all layers of a model have, and its indexer.

    Raises:
        ValueError: missing sizes.
    """
    missing = [name for name in (*_SIZES, *_INDEXER_SIZES) if fields.get(name) is None]
    if missing:
        raise ValueError(f"config must have {', '.join(missing)}, got a {model_type} config without them")
    shared = {
        **{name: fields[name] for name in _SIZES if name not in ("sliding_window", "num_hidden_layers")},
        "window": fields["sliding_window"],
        "rope_dim": _rope_dim(fields),
        "rms_norm_eps": fields.get("rms_norm_eps", 1e-6),
    }
    with checks.naming(**dict(zip(("num_heads", "head_dim", "topk"), _INDEXER_SIZES, strict=True))):
        return shared, V4IndexerConfig(*(fields[name] for name in _INDEXER_SIZES))


def _kinds(fields: Mapping[str, Any]) -> list[str]:
    """The type of each layer, from ``layer_types`` (transformers) or ``compress_ratios`` (checkpoints)."""
    count = models.num_layers(fields)
    if fields.get("layer_types") is None:
        ratios = (0, 4, 128)
        return [_KINDS[ratios.index(ratio)] for ratio in layer_ratios(fields, ratios)]
    kinds = models.list_of(fields, "layer_types")[:count]
    if len(kinds) < count:
        raise ValueError(f"layer_types must have an entry for each of num_hidden_layers {count}, got {len(kinds)}")
    for layer, kind in enumerate(kinds):
        checks.choice(f"layer_types[{layer}]", kind, _KINDS)
    return kinds


def layer_ratios(fields: Mapping[str, Any], accepted: tuple[int, ...]) -> list[int]:
    """The ratio of each layer, from ``compress_ratios``.

    Raises:
        TypeError, ValueError: no list; fewer entries than layers; another ratio than the accepted.
    """
    count = models.num_layers(fields)
    # Later ratios belong to draft layers (MTP).
    ratios = models.list_of(fields, "compress_ratios")[:count]
    if len(ratios) < count:
        raise ValueError(f"compress_ratios must have an entry for each of num_hidden_layers {count}, got {len(ratios)}")
    for ratio in ratios:
        if not checks.is_integer(ratio) or ratio not in accepted:
            raise ValueError(f"compress_ratios must be {checks.join_or(accepted)}, got {ratio!r}")
    return ratios


def _ratios(fields: Mapping[str, Any]) -> dict[str, int]:
    """Tokens of a group by layer type."""
    rates = models.sub_config(fields, "compress_rates")
    ratios = {}
    # Older field names take precedence in transformers.
    for kind, default, older in ((SELECTING, 4, "compress_rate_csa"), (COMPRESSING, 128, "compress_rate_hca")):
        name, ratio = (f"compress_rates.{kind}", rates.get(kind, default))
        if fields.get(older) is not None:
            name, ratio = older, fields[older]
        ratios[kind] = checks.positive_int(name, ratio, maximum=MAX_SIZE)
    return ratios


def _rope_dim(fields: Mapping[str, Any]) -> int:
    """From ``partial_rotary_factor`` (transformers), else ``qk_rope_head_dim`` (checkpoints)."""
    if _reads_rope_dim(fields):
        return fields["qk_rope_head_dim"]
    head_dim, factor = checks.positive_int("head_dim", fields["head_dim"]), fields.get("partial_rotary_factor")
    return int(head_dim * (0.125 if factor is None else checks.positive_number("partial_rotary_factor", factor)))


def _reads_rope_dim(fields: Mapping[str, Any]) -> bool:
    return fields.get("partial_rotary_factor") is None and fields.get("qk_rope_head_dim") is not None


def layer_ropes(fields: Mapping[str, Any]) -> dict[str, Rope]:
    """The rotations of layers without groups ("main") and of those with groups ("compress")."""
    parameters, theta = models.rope_parameters(fields), fields.get("rope_theta", 10000.0)
    max_position = max_position_embeddings(fields, 1048576)
    main, compress = (parameters.get(name) for name in ("main", "compress"))
    if not isinstance(main, Mapping) or not isinstance(compress, Mapping):
        # A checkpoint's YaRN scales neither cosines nor the softmax.
        compress = {"attention_factor": 1.0, **parameters, "rope_theta": fields.get("compress_rope_theta", 160000.0)}
        main = {}
        with checks.naming(rope_theta="compress_rope_theta"):
            compressed = _rope(compress, theta, max_position)
    else:
        compressed = _rope(compress, theta, max_position)
    return {"main": _rope(main, theta, max_position), "compress": compressed}


def _rope(parameters: Mapping[str, Any], theta: Any, max_position: int) -> Rope:
    parameters = models.standardized_rope(parameters, theta, max_position)
    rope = Rope.from_rope_parameters(parameters, models.INTERLEAVED, max_position)
    if rope.yarn is not None and not rope.yarn.truncate:
        raise ValueError("truncate must be true in the yarn of DeepSeek-V4, got false")
    return rope
