"""A problem's tensors on a device, the call that is timed, and the check of its result."""

from __future__ import annotations

import torch

from flashlatte import ops
from flashlatte.bench import problems
from flashlatte.bench.problems import Problem
from flashlatte.bench.workloads import (
    cache,
    dense_decode,
    dense_prefill,
    index_cache,
    index_select,
    indexer,
    indexer_loss,
    layer,
    paged_attention,
    sparse_attention,
    sparse_decode,
    sparse_prefill,
    turboquant,
    v4,
)
from flashlatte.bench.workloads.base import Workload, WrongResult

__all__ = ["Workload", "WrongResult", "prepare"]

_WORKLOADS = {
    problems.CacheCopy: cache.CacheCopyWorkload,
    problems.CacheGather: cache.CacheGatherWorkload,
    problems.CacheWrite: cache.CacheWriteWorkload,
    problems.Compress: v4.CompressWorkload,
    problems.ConcatMlaQ: layer.ConcatMlaQWorkload,
    problems.DenseDecode: dense_decode.DenseDecodeWorkload,
    problems.DensePrefillBackward: dense_prefill.DensePrefillBackwardWorkload,
    problems.DensePrefill: dense_prefill.DensePrefillWorkload,
    problems.GatherRecords: cache.GatherRecordsWorkload,
    problems.IndexerLoss: indexer_loss.IndexerLossWorkload,
    problems.IndexConvert: index_cache.IndexConvertWorkload,
    problems.IndexGather: index_cache.IndexGatherWorkload,
    problems.IndexLogits: indexer.IndexLogitsWorkload,
    problems.IndexQuantize: index_cache.IndexQuantizeWorkload,
    problems.IndexQuery: v4.IndexQueryWorkload,
    problems.IndexSelect: index_select.IndexSelectWorkload,
    problems.IndexWeights: layer.IndexWeightsWorkload,
    problems.IndexWorkspace: index_cache.IndexWorkspaceWorkload,
    problems.InverseRopeQuantize: v4.InverseRopeQuantizeWorkload,
    problems.LatentRows: layer.LatentRowsWorkload,
    problems.MergeStates: layer.MergeStatesWorkload,
    problems.MhcPost: v4.MhcPostWorkload,
    problems.MhcPre: v4.MhcPreWorkload,
    problems.PackSeq: layer.PackSeqWorkload,
    problems.PagedAttention: paged_attention.PagedAttentionWorkload,
    problems.PagedIndexLogits: indexer.PagedIndexLogitsWorkload,
    problems.SparseIndexLogits: indexer.SparseIndexLogitsWorkload,
    problems.PagedIndexSelect: index_select.PagedIndexSelectWorkload,
    problems.QKVNorm: v4.QKVNormWorkload,
    problems.ReshapeAndCache: cache.ReshapeAndCacheWorkload,
    problems.RopeCacheWrite: layer.RopeCacheWriteWorkload,
    problems.RotateAndCache: v4.RotateAndCacheWorkload,
    problems.RotateHeads: layer.RotateHeadsWorkload,
    problems.SparseAttentionBackward: sparse_attention.SparseAttentionBackwardWorkload,
    problems.SparseDecode: sparse_decode.SparseDecodeWorkload,
    problems.SparsePrefill: sparse_prefill.SparsePrefillWorkload,
    problems.TopK: indexer.TopKWorkload,
    problems.TurboQuantDecode: turboquant.TurboQuantDecodeWorkload,
    problems.TurboQuantGather: turboquant.TurboQuantGatherWorkload,
    problems.TurboQuantStore: turboquant.TurboQuantStoreWorkload,
    problems.UnpackSeq: layer.UnpackSeqWorkload,
}


def prepare(problem: Problem, device: torch.device) -> Workload:
    """Draw the problem's tensors, with a fixed seed, and import its operation."""
    ops.load()
    return _WORKLOADS[type(problem)](problem, device)
