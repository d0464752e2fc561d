"""What a layer of DeepSeek-V3 does between its products and attention, and with results of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashlatte.bench.problems.base import Problem


@dataclass(frozen=True)
class LatentRows(Problem):
    """Latents of 512 + 64 elements and queries' latents of ``rank``, normalised, rotated, and written to a cache."""

    tokens: int
    rank: int = 1536
    operation: ClassVar[str] = "latent_rows"
    name_pattern: ClassVar[str] = "latent-rows-t{tokens}-{rank}"


@dataclass(frozen=True)
class RotateHeads(Problem):
    tokens: int
    heads: int = 128
    operation: ClassVar[str] = "rotate_heads"
    name_pattern: ClassVar[str] = "rotate-heads-t{tokens}-h{heads}"


@dataclass(frozen=True)
class RopeCacheWrite(Problem):
    """Keys and queries rotated in place, the keys written into pages."""

    tokens: int
    heads: int = 128
    cache_format: str = "bf16"
    operation: ClassVar[str] = "rope_cache_write"
    name_pattern: ClassVar[str] = "rope-write-{cache_format}-t{tokens}-h{heads}"


@dataclass(frozen=True)
class ConcatMlaQ(Problem):
    """Latent parts of 512 and rotated ones of 64, heads before tokens in memory, as products leave them."""

    tokens: int
    heads: int = 128
    operation: ClassVar[str] = "concat_mla_q"
    name_pattern: ClassVar[str] = "concat-q-t{tokens}-h{heads}"


@dataclass(frozen=True)
class MergeStates(Problem):
    """``parts`` results of attention over different keys, heads of dimension 128."""

    tokens: int
    parts: int = 2
    heads: int = 128
    operation: ClassVar[str] = "merge_states"
    name_pattern: ClassVar[str] = "merge-{parts}-t{tokens}-h{heads}"


@dataclass(frozen=True)
class PackSeq(Problem):
    """``batch`` requests of up to ``tokens`` tokens, heads of dimension 576, into rows of equal length."""

    batch: int
    tokens: int
    heads: int = 16
    operation: ClassVar[str] = "pack_seq"
    name_pattern: ClassVar[str] = "pack-b{batch}-t{tokens}-h{heads}"


@dataclass(frozen=True)
class UnpackSeq(PackSeq):
    """And back."""

    operation: ClassVar[str] = "unpack_seq"
    name_pattern: ClassVar[str] = "unpack-b{batch}-t{tokens}-h{heads}"
