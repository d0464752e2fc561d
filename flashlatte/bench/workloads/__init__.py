"""A problem's tensors on a device, the call that is timed, and the check of its result."""

from __future__ import annotations

import torch

from flashlatte import ops
from flashlatte.bench import problems
from flashlatte.bench.problems import Problem
from flashlatte.bench.workloads.base import Workload, WrongResult
from flashlatte.bench.workloads.cache import CacheGatherWorkload, CacheWriteWorkload
from flashlatte.bench.workloads.cache_pages import CacheCopyWorkload, GatherRecordsWorkload, ReshapeAndCacheWorkload
from flashlatte.bench.workloads.compress import CompressWorkload
from flashlatte.bench.workloads.dense_decode import DenseDecodeWorkload
from flashlatte.bench.workloads.dense_prefill import DensePrefillBackwardWorkload, DensePrefillWorkload
from flashlatte.bench.workloads.index_cache import (
    IndexConvertWorkload,
    IndexGatherWorkload,
    IndexQuantizeWorkload,
    IndexWorkspaceWorkload,
)
from flashlatte.bench.workloads.index_select import IndexSelectWorkload, PagedIndexSelectWorkload
from flashlatte.bench.workloads.indexer import IndexLogitsWorkload, PagedIndexLogitsWorkload, TopKWorkload
from flashlatte.bench.workloads.indexer_loss import IndexerLossWorkload
from flashlatte.bench.workloads.layer import (
    ConcatMlaQWorkload,
    IndexWeightsWorkload,
    LatentRowsWorkload,
    RopeCacheWriteWorkload,
    RotateHeadsWorkload,
)
from flashlatte.bench.workloads.paged_attention import PagedAttentionWorkload
from flashlatte.bench.workloads.sequences import MergeStatesWorkload, PackSeqWorkload, UnpackSeqWorkload
from flashlatte.bench.workloads.sparse_attention import SparseAttentionBackwardWorkload
from flashlatte.bench.workloads.sparse_decode import SparseDecodeWorkload
from flashlatte.bench.workloads.sparse_index_logits import SparseIndexLogitsWorkload
from flashlatte.bench.workloads.sparse_prefill import SparsePrefillWorkload
from flashlatte.bench.workloads.turboquant import (
    TurboQuantDecodeWorkload,
    TurboQuantGatherWorkload,
    TurboQuantStoreWorkload,
)
from flashlatte.bench.workloads.v4 import (
    IndexQueryWorkload,
    InverseRopeQuantizeWorkload,
    MhcPostWorkload,
    MhcPreWorkload,
    QKVNormWorkload,
    RotateAndCacheWorkload,
)

__all__ = ["Workload", "WrongResult", "prepare"]

_WORKLOADS = {
    problems.CacheCopy: CacheCopyWorkload,
    problems.CacheGather: CacheGatherWorkload,
    problems.CacheWrite: CacheWriteWorkload,
    problems.Compress: CompressWorkload,
    problems.ConcatMlaQ: ConcatMlaQWorkload,
    problems.DenseDecode: DenseDecodeWorkload,
    problems.DensePrefillBackward: DensePrefillBackwardWorkload,
    problems.DensePrefill: DensePrefillWorkload,
    problems.GatherRecords: GatherRecordsWorkload,
    problems.IndexerLoss: IndexerLossWorkload,
    problems.IndexConvert: IndexConvertWorkload,
    problems.IndexGather: IndexGatherWorkload,
    problems.IndexLogits: IndexLogitsWorkload,
    problems.IndexQuantize: IndexQuantizeWorkload,
    problems.IndexQuery: IndexQueryWorkload,
    problems.IndexSelect: IndexSelectWorkload,
    problems.IndexWeights: IndexWeightsWorkload,
    problems.IndexWorkspace: IndexWorkspaceWorkload,
    problems.InverseRopeQuantize: InverseRopeQuantizeWorkload,
    problems.LatentRows: LatentRowsWorkload,
    problems.MergeStates: MergeStatesWorkload,
    problems.MhcPost: MhcPostWorkload,
    problems.MhcPre: MhcPreWorkload,
    problems.PackSeq: PackSeqWorkload,
    problems.PagedAttention: PagedAttentionWorkload,
    problems.PagedIndexLogits: PagedIndexLogitsWorkload,
    problems.SparseIndexLogits: SparseIndexLogitsWorkload,
    problems.PagedIndexSelect: PagedIndexSelectWorkload,
    problems.QKVNorm: QKVNormWorkload,
    problems.ReshapeAndCache: ReshapeAndCacheWorkload,
    problems.RopeCacheWrite: RopeCacheWriteWorkload,
    problems.RotateAndCache: RotateAndCacheWorkload,
    problems.RotateHeads: RotateHeadsWorkload,
    problems.SparseAttentionBackward: SparseAttentionBackwardWorkload,
    problems.SparseDecode: SparseDecodeWorkload,
    problems.SparsePrefill: SparsePrefillWorkload,
    problems.TopK: TopKWorkload,
    problems.TurboQuantDecode: TurboQuantDecodeWorkload,
    problems.TurboQuantGather: TurboQuantGatherWorkload,
    problems.TurboQuantStore: TurboQuantStoreWorkload,
    problems.UnpackSeq: UnpackSeqWorkload,
}


def prepare(problem: Problem, device: torch.device) -> Workload:
    """Draw the problem's tensors, the same ones every time. Its operation is known to ``dispatch`` then."""
    ops.load()
    return _WORKLOADS[type(problem)](problem, device)
