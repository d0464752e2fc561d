"""The launcher: CTAs, threads and list capacity per row, from shapes alone."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch

from flashlatte.kernels.triton.dependent_launch import launch_options
from flashlatte.ops.topk.hopper.kernel import TopkConfig, kernel_1_cta, kernel_2_ctas, kernel_8_ctas
from flashlatte.ops.topk.hopper.shared_layout import num_words
from flashlatte.ops.topk.order import rows_of
from flashlatte.ops.topk.outputs import outputs_of
from flashlatte.ops.topk.reference import TopkParams
from flashlatte.runtime import machine

# By number of CTAs per row.
KERNELS = {1: kernel_1_cta, 2: kernel_2_ctas, 8: kernel_8_ctas}
MIN_CAPACITY = 2048
# Target fill of the list: k and the capacity are each about five standard deviations away.
TARGET_FILL = 0.7
# Entries per thread and block: of the list pass, and of the radix select on the row.
ENTRIES_PER_THREAD, MASKED_ENTRIES_PER_THREAD = 16, 4
# Entries of a sample that are processed at a time.
SAMPLE_BLOCK = 4096
# Size of the first sample, by number of CTAs per row. If a small sample fails, a larger one follows: with 131,072
# columns for one row in 600 with 4,096 entries, and for one in 100,000 with 8,192. With many rows, one such row would
# delay all.
FIRST_SAMPLE = {8: 4096, 2: 8192, 1: 16384}


def topk(params: TopkParams) -> None:
    rows, k = params.indices.shape
    capacity = max(1 << (2 * k - 1).bit_length(), MIN_CAPACITY)
    interpreting = machine.interpreting()
    sms = 0 if interpreting else machine.num_sms(params.logits.device)
    ctas, warps, registers = _launch_shape(rows, sms, params.values is not None)
    # Between the kernels of the logits and of the slots, programmatic dependent launch saves 1 of 22 µs with one row,
    # and costs 3 of 70 µs with 64 rows.
    overlapped = ctas == max(KERNELS)
    config = TopkConfig(
        per_request=params.per_request,
        capacity=capacity,
        block=32 * warps * ENTRIES_PER_THREAD,
        sample_block=SAMPLE_BLOCK,
        masked_block=32 * warps * MASKED_ENTRIES_PER_THREAD,
        first_sample=FIRST_SAMPLE[ctas],
        # More rows have eight warps and 80 registers per thread, too few for the keys of a short row.
        short_rows=interpreting or rows <= sms,
        prefetch=rows <= sms,
        ctas=ctas,
        overlapped=overlapped,
    )
    KERNELS[ctas][(rows,)](
        rows_of(params),
        *outputs_of(params),
        interpreted_memory=torch.empty(num_words(capacity), dtype=torch.int32) if interpreting else None,
        target=int(TARGET_FILL * capacity),
        CONFIG=config,
        num_warps=warps,
        maxnreg=registers,
        **launch_options(overlapped),
    )


def _launch_shape(rows: int, sms: int, with_values: bool) -> tuple[int, int, int | None]:
    """CTAs per row, warps per CTA, and the register limit per thread, or None."""
    if rows > sms:
        # Three CTAs per SM: 4,096 x 32,768 takes 252 µs instead of 310 with 16 warps. With values, eight warps would
        # exchange them through shared memory, which does not fit next to the CTA's own words.
        return (1, 16, None) if with_values else (1, 8, 80)
    # Clusters if all rows can run at the same time. Clusters of 8 do not fill all SMs, so their limit is lower: 16 rows
    # of 65,536 took 20 µs with them, and 20 rows of 131,072 take 14 µs with 2 CTAs each.
    max_rows = {8: sms // 2, 2: sms, 1: sms}
    return next(ctas for ctas in sorted(KERNELS, reverse=True) if rows * ctas <= max_rows[ctas]), 16, None
