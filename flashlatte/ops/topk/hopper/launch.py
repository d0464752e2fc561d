"""How many threads and CTAs a row gets, from shapes alone."""

from __future__ import annotations

import torch

from flashlatte.kernels.triton.dependent_launch import launch_options
from flashlatte.ops.topk.hopper.kernel import kernel_of_eight, kernel_of_one, kernel_of_two
from flashlatte.ops.topk.hopper.memory import words
from flashlatte.runtime import machine
from flashlatte.runtime.strides import stride_in_use

# By the number of CTAs that work on a row.
KERNELS = {1: kernel_of_one, 2: kernel_of_two, 8: kernel_of_eight}
FEWEST_PLACES = 2048
# Of the places of the list, how many should be taken: k is five standard deviations below, and all places are above.
FILL = 0.7
# Entries that a thread has of a block: of the row, and of what is counted without a sample.
ENTRIES, MASKED_ENTRIES = 16, 4
# Entries of a sample that are looked at at once.
SAMPLE_BLOCK = 4096
# Of a row's first sample, by the number of CTAs that work on a row. A small one that misleads is followed by a larger:
# of 131,072 columns one row in 600 with 4,096 entries, and one in 100,000 with 8,192. A row of many would delay all.
FIRST_SAMPLE = {8: 4096, 2: 8192, 1: 16384}


def topk(
    logits: torch.Tensor,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    next_n: int,
    indices: torch.Tensor,
    values: torch.Tensor | None,
) -> None:
    rows, width = logits.shape
    k = indices.shape[1]
    places = max(1 << (2 * k - 1).bit_length(), FEWEST_PLACES)
    interpreting = machine.interpreting()
    sms = 0 if interpreting else machine.num_sms(logits.device)
    ctas, warps, registers = _threads(rows, sms, values is not None)
    # One row between its logits and its slots is 1 µs of 22 faster then, and 64 rows are 3 of 70 slower.
    overlapped = ctas == max(KERNELS)
    KERNELS[ctas][(rows,)](
        logits=logits,
        start=start,
        end=end,
        indices=indices,
        values=values,
        interpreted_memory=torch.empty(words(places), dtype=torch.int32) if interpreting else None,
        width=width,
        k=k,
        wanted=int(FILL * places),
        next_n=next_n,
        logits_stride=stride_in_use(logits, 0),
        start_stride=0 if start is None else start.stride(0),
        end_stride=0 if end is None else end.stride(0),
        index_stride=stride_in_use(indices, 0),
        value_stride=0 if values is None else stride_in_use(values, 0),
        PER_REQUEST=end is not None and end.shape[0] != rows,
        CAPACITY=places,
        BLOCK=32 * warps * ENTRIES,
        SAMPLE_BLOCK=SAMPLE_BLOCK,
        MASKED_BLOCK=32 * warps * MASKED_ENTRIES,
        FIRST_SAMPLE=FIRST_SAMPLE[ctas],
        EARLY=rows <= sms,
        CTAS=ctas,
        OVERLAPPED=overlapped,
        INTERPRETED=interpreting,
        num_warps=warps,
        maxnreg=registers,
        **launch_options(overlapped),
    )


def _threads(rows: int, sms: int, with_values: bool) -> tuple[int, int, int | None]:
    """CTAs of a row, warps of a CTA, and the registers that a thread may have, if they are limited."""
    if rows > sms:
        # Three programs on an SM: 4,096 x 32,768 takes 252 µs, and 310 with 16 warps. Eight warps that store values
        # exchange them through shared memory, of which a program's own words leave too little.
        return (1, 16, None) if with_values else (1, 8, 80)
    # Clusters while no row waits for another, which those of 8 do sooner as they do not fill all SMs: 16 rows of 65,536
    # took 20 µs with them, and 20 rows of 131,072 take 14 with 2 CTAs each.
    most = {8: sms // 2, 2: sms, 1: sms}
    return next(ctas for ctas in sorted(KERNELS, reverse=True) if rows * ctas <= most[ctas]), 16, None
