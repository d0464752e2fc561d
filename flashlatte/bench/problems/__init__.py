"""The problems of benchmark cases: their shapes, as values that compare and print."""

from __future__ import annotations

from flashlatte.bench.problems.attention import (
    DenseDecode,
    DensePrefill,
    DensePrefillBackward,
    PagedAttention,
    SparseAttentionBackward,
    SparseDecode,
    SparsePrefill,
)
from flashlatte.bench.problems.base import Problem
from flashlatte.bench.problems.caches import CacheCopy, CacheGather, CacheWrite, GatherRecords, ReshapeAndCache
from flashlatte.bench.problems.index_cache import IndexConvert, IndexGather, IndexQuantize
from flashlatte.bench.problems.indexer import (
    IndexerLoss,
    IndexLogits,
    IndexSelect,
    PagedIndexLogits,
    PagedIndexSelect,
    SparseIndexLogits,
    TopK,
)
from flashlatte.bench.problems.layer import (
    ConcatMlaQ,
    LatentRows,
    MergeStates,
    PackSeq,
    RopeCacheWrite,
    RotateHeads,
    UnpackSeq,
)
from flashlatte.bench.problems.turboquant import TurboQuantDecode, TurboQuantGather, TurboQuantStore
from flashlatte.bench.problems.v4 import (
    Compress,
    IndexQuery,
    IndexWeights,
    IndexWorkspace,
    InverseRopeQuantize,
    MhcPost,
    MhcPre,
    QKVNorm,
    RotateAndCache,
)

__all__ = [
    "CacheCopy",
    "CacheGather",
    "CacheWrite",
    "Compress",
    "ConcatMlaQ",
    "DenseDecode",
    "DensePrefill",
    "DensePrefillBackward",
    "GatherRecords",
    "IndexConvert",
    "IndexGather",
    "IndexLogits",
    "IndexQuantize",
    "IndexQuery",
    "IndexSelect",
    "IndexWeights",
    "IndexWorkspace",
    "IndexerLoss",
    "InverseRopeQuantize",
    "LatentRows",
    "MergeStates",
    "MhcPost",
    "MhcPre",
    "PackSeq",
    "PagedAttention",
    "PagedIndexLogits",
    "PagedIndexSelect",
    "Problem",
    "QKVNorm",
    "ReshapeAndCache",
    "RopeCacheWrite",
    "RotateAndCache",
    "RotateHeads",
    "SparseAttentionBackward",
    "SparseDecode",
    "SparseIndexLogits",
    "SparsePrefill",
    "TopK",
    "TurboQuantDecode",
    "TurboQuantGather",
    "TurboQuantStore",
    "UnpackSeq",
]
