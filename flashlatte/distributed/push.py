"""``push``: one kernel reads a tensor once and stores it in the memory of every rank.

Stores over NVLink do not wait for a response, unlike loads, and the data arrives where it is read. For queries of 64
requests and 128 heads on two H200s it takes 20 µs including the barrier, against 25 µs for a copy, a barrier and
torch.cat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flashlatte.runtime import machine
from flashlatte.runtime.repeat import repeats_launches

VECTOR_BYTES = 16
# Bytes that a program copies.
BLOCK_BYTES = 4096
NUM_WARPS = 4


@repeats_launches
def push(x: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy x [T, h, d] into each of ``targets`` in order; their last two dims must be contiguous.

    Ranks should pass targets in different orders, so that they send to different GPUs at a time.
    """
    if machine.device_type(x.device) == "cpu" and not machine.interpreting():
        for target in targets:
            target.copy_(x)
    elif x.numel():
        _launch(x.contiguous(), targets)


def _launch(x: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    # Imported here, as it needs Triton.
    from flashlatte.distributed import push_kernel

    num_rows, row_size, target_row_size = x.shape[0], x[0].numel(), targets[0].stride(0)
    vector = math.gcd(VECTOR_BYTES // x.element_size(), row_size, target_row_size)
    block = BLOCK_BYTES // x.element_size()
    push_kernel.push_kernel[(num_rows * -(-row_size // block),)](
        x,
        tuple(targets),
        row_units=row_size // vector,
        target_row_units=target_row_size // vector,
        TARGETS=len(targets),
        ALIGN=vector,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )
