"""How rows are divided over programs, from shapes alone."""

from __future__ import annotations

import torch

from flashlatte.kernels.triton.cache_layout import blocks
from flashlatte.ops.topk.portable.filter import filter_kernel
from flashlatte.ops.topk.portable.finish import finish_kernel
from flashlatte.runtime import machine
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import launching_on

SCRATCH_BYTES = 64 * 2**20
# Candidates for each entry that is wanted: room for four times k, of which about half is to be filled.
PLACES_PER_K = 4
FEWEST_PLACES = 1024
SAMPLE = 4096
# From this width on, where fewer of a sample are candidates, it is larger.
WIDE_ROWS, WIDE_SAMPLE = 2**19, 16384
BLOCK = 4096
MAX_CHUNKS = 16
SMALLEST_CHUNK = 4096
ENTRIES_PER_THREAD = 16
FILTER_WARPS = 8
PROGRAMS_PER_SM = 2


def topk(
    logits: torch.Tensor,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    next_n: int,
    previous: torch.Tensor | None,
    indices: torch.Tensor,
    values: torch.Tensor | None,
) -> None:
    rows, width = logits.shape
    k = indices.shape[1]
    places = max(1 << (PLACES_PER_K * k - 1).bit_length(), FEWEST_PLACES)
    if width <= places:
        _finish(logits, start, end, next_n, None, None, None, indices, values, 0, rows, 1, places)
        return
    per_row = blocks(PROGRAMS_PER_SM * machine.num_sms(logits.device), rows)
    chunks = max(1, min(per_row, MAX_CHUNKS, width // SMALLEST_CHUNK))
    at_a_time = max(1, min(rows, SCRATCH_BYTES // (8 * places * chunks)))
    candidate_keys, candidate_columns = (
        torch.empty(at_a_time * chunks, places, dtype=torch.int32, device=logits.device) for _ in range(2)
    )
    counts = torch.empty(at_a_time * chunks, dtype=torch.int32, device=logits.device)
    for first_row in range(0, rows, at_a_time):
        count = min(at_a_time, rows - first_row)
        with launching_on(logits.device):
            filter_kernel[(count * chunks,)](
                logits,
                start,
                end,
                candidate_keys,
                candidate_columns,
                counts,
                first_row,
                width,
                chunks,
                places // 2,
                next_n,
                stride_in_use(logits, 0),
                0 if start is None else start.stride(0),
                0 if end is None else end.stride(0),
                end is not None and end.shape[0] != rows,
                places,
                SAMPLE if width < WIDE_ROWS else WIDE_SAMPLE,
                BLOCK,
                machine.interpreting(),
                num_warps=FILTER_WARPS,
            )
        _finish(
            logits,
            start,
            end,
            next_n,
            candidate_keys,
            candidate_columns,
            counts,
            indices,
            values,
            first_row,
            count,
            chunks,
            places,
        )


def _finish(
    logits: torch.Tensor,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    next_n: int,
    candidate_keys: torch.Tensor | None,
    candidate_columns: torch.Tensor | None,
    counts: torch.Tensor | None,
    indices: torch.Tensor,
    values: torch.Tensor | None,
    first_row: int,
    rows: int,
    chunks: int,
    places: int,
) -> None:
    with launching_on(logits.device):
        finish_kernel[(rows,)](
            logits,
            start,
            end,
            candidate_keys,
            candidate_columns,
            counts,
            indices,
            values,
            first_row,
            logits.shape[1],
            chunks,
            indices.shape[1],
            next_n,
            stride_in_use(logits, 0),
            0 if start is None else start.stride(0),
            0 if end is None else end.stride(0),
            stride_in_use(indices, 0),
            0 if values is None else stride_in_use(values, 0),
            end is not None and end.shape[0] != logits.shape[0],
            places,
            places // 2,
            machine.interpreting(),
            num_warps=max(places // (32 * ENTRIES_PER_THREAD), 4),
        )
