"""The division of rows over programs, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte.kernels.triton.cache_layout import cdiv
from flashlatte.ops.topk.order import rows_of
from flashlatte.ops.topk.outputs import outputs_of
from flashlatte.ops.topk.portable.filter import TopkCandidates, filter_kernel
from flashlatte.ops.topk.portable.finish import finish_kernel
from flashlatte.ops.topk.reference import TopkParams
from flashlatte.runtime import machine

SCRATCH_BYTES = 64 * 2**20
MIN_CAPACITY = 1024
SMALLEST_CHUNK = 4096
MAX_CHUNKS = 16
PROGRAMS_PER_SM = 2
# With more warps, a thread would have too few registers.
MAX_WARPS = 16
# Entries per thread of the filter kernel.
FILTER_ENTRIES = 16


@dataclass(frozen=True)
class Regime:
    """The parameters for a range of shapes.

    Attributes:
        capacity_per_k: capacity of the candidate buffer, per selected entry.
        fill: the fraction of the buffer that a threshold should fill.
        filter_warps: warps of a filter program.
        finish_entries: candidates per thread of the finish kernel.
    """

    capacity_per_k: int
    fill: float
    filter_warps: int
    finish_entries: int

    def sample(self, width: int, capacity: int) -> int:
        """Entries of a sample, 4,096 to 16,384: enough for a number of candidates within 20% of the target with high
        probability.
        """
        sample = _MIN_RANK * width / (self.fill * capacity)
        return min(max(1 << max(int(sample) - 1, 0).bit_length(), 4096), 16384)


# The standard error of rank r in a sample is √r: 1/16 for rank 256; five standard errors are rare.
_MIN_RANK = 256
# Many rows fill the GPU with small programs. Few rows are divided into chunks, each of which samples its row.
MANY_ROWS = Regime(capacity_per_k=2, fill=0.7, filter_warps=4, finish_entries=32)
FEW_ROWS = Regime(capacity_per_k=4, fill=0.5, filter_warps=8, finish_entries=16)


def topk(params: TopkParams) -> None:
    rows, width = params.logits.shape
    k, device = params.indices.shape[1], params.logits.device
    programs = PROGRAMS_PER_SM * machine.num_sms(device)
    regime = MANY_ROWS if rows >= programs else FEW_ROWS
    capacity = max(1 << (regime.capacity_per_k * k - 1).bit_length(), MIN_CAPACITY)
    warps = min(max(capacity // (32 * regime.finish_entries), 4), MAX_WARPS)
    if width <= capacity:
        _finish(params, TopkCandidates(None, None, None, 1), 0, rows, capacity, warps)
        return
    chunks = 1 if regime is MANY_ROWS else max(1, min(cdiv(programs, rows), MAX_CHUNKS, width // SMALLEST_CHUNK))
    at_a_time = max(1, min(rows, SCRATCH_BYTES // (8 * capacity * chunks)))
    keys, columns = (torch.empty(at_a_time * chunks, capacity, dtype=torch.int32, device=device) for _ in range(2))
    counts = torch.empty(at_a_time * chunks, dtype=torch.int32, device=device)
    candidates = TopkCandidates(keys, columns, counts, chunks)
    for first_row in range(0, rows, at_a_time):
        count = min(at_a_time, rows - first_row)
        filter_kernel[(count * chunks,)](
            rows_of(params),
            candidates,
            first_row=first_row,
            target=int(regime.fill * capacity),
            PER_REQUEST=params.per_request,
            CAPACITY=capacity,
            SAMPLE=4096 if chunks > 1 else regime.sample(width, capacity),
            BLOCK=32 * regime.filter_warps * FILTER_ENTRIES,
            num_warps=regime.filter_warps,
        )
        _finish(params, candidates, first_row, count, capacity, warps)


def _finish(
    params: TopkParams, candidates: TopkCandidates, first_row: int, rows: int, capacity: int, warps: int
) -> None:
    finish_kernel[(rows,)](
        rows_of(params),
        *outputs_of(params),
        candidates,
        first_row=first_row,
        PER_REQUEST=params.per_request,
        SPLIT=candidates.chunks > 1,
        CAPACITY=capacity,
        BLOCK=capacity // 4,
        num_warps=warps,
    )
