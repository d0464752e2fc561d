"""What one layer of DeepSeek-V4's attention is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashlatte.kv_cache.index_formats import HEAD_DIMS
from flashlatte.layers.config import Rope, Yarn
from flashlatte.runtime import checks

_RATIO_NAMES = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


@dataclass(frozen=True)
class V4IndexerConfig:
    """The indexer of a layer: which groups a query attends to.

    Attributes:
        num_heads, head_dim: of its queries; head_dim 32, 64 or 128.
        topk: groups that a query selects at most.
    """

    num_heads: int = 64
    head_dim: int = 128
    topk: int = 512

    def __post_init__(self) -> None:
        for name in ("num_heads", "topk"):
            checks.positive_int(name, getattr(self, name))
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim of an indexer must be 32, 64 or 128, got {self.head_dim!r}")


@dataclass(frozen=True)
class V4Config:
    """One layer. Its defaults are those of DeepSeek-V4-Flash where it compresses 4 tokens to one.

    Attributes:
        hidden_size, q_lora_rank: of hidden states, and of the query's latent.
        num_attention_heads, head_dim, rope_dim: of queries; there is one key of head_dim, which is the value too, and
            its last rope_dim numbers are rotated in pairs (2i, 2i + 1).
        o_groups, o_lora_rank: heads are projected in so many groups, to so many numbers each.
        window: tokens that a query sees as they are, its own among them.
        ratio: tokens of a compressed group; 0 if the layer has the window only.
        indexer: selects groups. With one, groups overlap: a row is made of its group and the one before. Without one a
            query sees all groups.
        rope: of queries, keys and groups alike.
        rms_norm_eps: of all norms.
    """

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
        sizes = ("hidden_size", "q_lora_rank", "num_attention_heads", "head_dim", "o_groups", "o_lora_rank", "window")
        for name in sizes:
            checks.positive_int(name, getattr(self, name))
        checks.positive_int("ratio", self.ratio, or_zero=True)
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
        """Groups before its own that a row is made of."""
        return 0 if self.indexer is None else 1

    @classmethod
    def from_transformers(cls, config: Any, layer: int) -> V4Config:
        """Of layer number ``layer`` of a transformers ``DeepseekV4Config``.

        Raises:
            ValueError: a kind of layer or of rotary embedding that is not known.
        """
        kind = config.layer_types[layer]
        checks.choice(f"layer_types[{layer}]", kind, _RATIO_NAMES)
        sliding, selects = kind == _RATIO_NAMES[0], kind == _RATIO_NAMES[1]
        indexer = V4IndexerConfig(config.index_n_heads, config.index_head_dim, config.index_topk)
        return cls(
            hidden_size=config.hidden_size,
            q_lora_rank=config.q_lora_rank,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            rope_dim=config.qk_rope_head_dim,
            o_groups=config.o_groups,
            o_lora_rank=config.o_lora_rank,
            window=config.sliding_window,
            ratio=0 if sliding else config.compress_rates[kind],
            indexer=indexer if selects else None,
            rope=_rope(config.rope_parameters["main" if sliding else "compress"], config.max_position_embeddings),
            rms_norm_eps=config.rms_norm_eps,
        )


def _rope(fields: Mapping[str, Any], max_position: int) -> Rope:
    kind = fields.get("rope_type", "default")
    checks.choice("rope_type", kind, ("default", "yarn"))
    yarn = None
    if kind == "yarn":
        original = fields.get("original_max_position_embeddings") or max_position
        yarn = Yarn(
            factor=fields["factor"],
            original_max_position=original,
            beta_fast=fields.get("beta_fast") or 32.0,
            beta_slow=fields.get("beta_slow") or 1.0,
            # DeepSeek-V4 scales neither cosines nor the softmax by its context's factor.
            attention_factor=fields.get("attention_factor", 1.0),
            truncate=fields.get("truncate", True),
        )
    return Rope(theta=fields["rope_theta"], max_position=max_position, yarn=yarn)
