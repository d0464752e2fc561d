"""A problem's tensors on a device, the call that is timed, and the check of its result."""

from __future__ import annotations

import torch

from flashlatte.bench.problems import (
    CacheGather,
    CacheWrite,
    DenseDecode,
    DensePrefill,
    DensePrefillBackward,
    IndexLogits,
    IndexSelect,
    PagedIndexLogits,
    PagedIndexSelect,
    Problem,
    SparseDecode,
    SparsePrefill,
    TopK,
    TurboQuantDecode,
    TurboQuantStore,
)
from flashlatte.bench.workloads.base import Workload, WrongResult
from flashlatte.bench.workloads.cache import CacheGatherWorkload, CacheWriteWorkload
from flashlatte.bench.workloads.dense_decode import DenseDecodeWorkload
from flashlatte.bench.workloads.dense_prefill import DensePrefillBackwardWorkload, DensePrefillWorkload
from flashlatte.bench.workloads.index_select import IndexSelectWorkload, PagedIndexSelectWorkload
from flashlatte.bench.workloads.indexer import IndexLogitsWorkload, PagedIndexLogitsWorkload, TopKWorkload
from flashlatte.bench.workloads.sparse_decode import SparseDecodeWorkload
from flashlatte.bench.workloads.sparse_prefill import SparsePrefillWorkload
from flashlatte.bench.workloads.turboquant import TurboQuantDecodeWorkload, TurboQuantStoreWorkload

__all__ = ["Workload", "WrongResult", "prepare"]

_WORKLOADS = {
    DenseDecode: DenseDecodeWorkload,
    SparseDecode: SparseDecodeWorkload,
    SparsePrefill: SparsePrefillWorkload,
    DensePrefill: DensePrefillWorkload,
    DensePrefillBackward: DensePrefillBackwardWorkload,
    CacheWrite: CacheWriteWorkload,
    CacheGather: CacheGatherWorkload,
    IndexLogits: IndexLogitsWorkload,
    PagedIndexLogits: PagedIndexLogitsWorkload,
    IndexSelect: IndexSelectWorkload,
    PagedIndexSelect: PagedIndexSelectWorkload,
    TopK: TopKWorkload,
    TurboQuantDecode: TurboQuantDecodeWorkload,
    TurboQuantStore: TurboQuantStoreWorkload,
}


def prepare(problem: Problem, device: torch.device) -> Workload:
    """Draw the problem's tensors, the same ones every time."""
    return _WORKLOADS[type(problem)](problem, device)
