"""A problem's tensors on a device, the call that is timed, and the check of its result."""

from __future__ import annotations

import torch

from flashlatte import ops
from flashlatte.bench.problems import Problem
from flashlatte.bench.workloads import (  # noqa: F401 (each names its kinds of problems)
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


def prepare(problem: Problem, device: torch.device) -> Workload:
    """Draw the problem's tensors, with a fixed seed, and import its operation."""
    ops.load()
    return Workload.kinds[type(problem)](problem, device)
