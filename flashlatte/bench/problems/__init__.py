"""What a benchmark case computes: the shapes, as values that compare and print."""

from __future__ import annotations

from flashlatte.bench.problems.attention import (
    DenseDecode,
    DensePrefill,
    DensePrefillBackward,
    SparseDecode,
    SparsePrefill,
)
from flashlatte.bench.problems.caches import CacheGather, CacheWrite
from flashlatte.bench.problems.indexer import IndexLogits, IndexSelect, PagedIndexLogits, PagedIndexSelect, TopK
from flashlatte.bench.problems.turboquant import TurboQuantDecode, TurboQuantStore

Problem = (
    DenseDecode
    | SparseDecode
    | SparsePrefill
    | DensePrefill
    | CacheWrite
    | CacheGather
    | IndexLogits
    | PagedIndexLogits
    | IndexSelect
    | PagedIndexSelect
    | TopK
    | TurboQuantDecode
    | TurboQuantStore
)

__all__ = [
    "CacheGather",
    "CacheWrite",
    "DenseDecode",
    "DensePrefill",
    "DensePrefillBackward",
    "IndexLogits",
    "IndexSelect",
    "PagedIndexLogits",
    "PagedIndexSelect",
    "Problem",
    "SparseDecode",
    "SparsePrefill",
    "TopK",
    "TurboQuantDecode",
    "TurboQuantStore",
]
