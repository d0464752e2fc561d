"""Kernels before and after the main kernel: delta and lse of rows, and the conversion of dQ."""

# Triton's annotations and calls are not Python's.
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

import triton.language as tl

from flashlatte.kernels.triton.online_softmax import LOG2_E
from flashlatte.kernels.triton.rows import HeadRows, head_row
from flashlatte.ops.dense_prefill.hopper.backward.dq import QueryGradient
from flashlatte.runtime.triton_kernel import kernel

# Tokens of a head per program.
TOKENS = tl.constexpr(32)
# Semaphores that a program sets to 0 at a time.
SEMAPHORES = tl.constexpr(128)


@kernel
def prepare_kernel(
    out: HeadRows,
    dout: HeadRows,
    lse: HeadRows,
    dlse: HeadRows,
    dq: QueryGradient,
    row_lse,
    delta,
    tokens: tl.int32,
    heads: tl.int32,
    V_DIM: tl.constexpr,
    QK_DIM: tl.constexpr,
):
    """Compute delta = Σ out · dout - dlse and lse · log2 e (inf for rows without keys), each float32 [heads, tokens],
    and zero the sums of dQ and the semaphores."""
    # Adjacent programs process the heads of the same tokens, which are adjacent in memory.
    head = (tl.program_id(0) % heads).to(tl.int64)
    block = tl.program_id(0) // heads
    token = block * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    column = tl.arange(0, V_DIM)
    token = token.to(tl.int64)
    out_row, dout_row = head_row(out, token, head), head_row(dout, token, head)
    result = tl.load(out_row[:, None] + column[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    gradient = tl.load(dout_row[:, None] + column[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    sums = tl.sum(result * gradient, 1)
    if dlse.start is not None:
        sums -= tl.load(head_row(dlse, token, head), mask=inside, other=0.0)
    natural = tl.load(head_row(lse, token, head), mask=inside, other=0.0)
    empty = tl.abs(natural) == float("inf")
    tl.store(delta + head * tokens + token, tl.where(empty, 0.0, sums), mask=inside)
    tl.store(row_lse + head * tokens + token, tl.where(empty, float("inf"), natural * LOG2_E), mask=inside)
    for first in tl.static_range(0, QK_DIM, 64):
        sum_column = first + tl.arange(0, 64)
        start = (head * tokens + token) * QK_DIM
        zeros = tl.zeros([TOKENS, 64], tl.float32)
        tl.store(dq.sums + start[:, None] + sum_column[None, :], zeros, mask=inside[:, None])
    if dq.semaphores is not None:
        blocks = tl.num_programs(0) // heads
        index = block * SEMAPHORES + tl.arange(0, SEMAPHORES)
        for _ in range(0, tl.cdiv(dq.tiles_per_head, SEMAPHORES * blocks)):
            tl.store(dq.semaphores + head * dq.tiles_per_head + index, 0, mask=index < dq.tiles_per_head)
            index += blocks * SEMAPHORES


@kernel
def finish_kernel(
    dq: HeadRows,
    dq_sums,
    tokens: tl.int32,
    heads: tl.int32,
    softmax_scale: tl.float32,
    QK_DIM: tl.constexpr,
):
    """Write dQ from its sums: undo the permutation of columns, scale, and cast."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    token = (tl.program_id(0) // heads) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    token = token.to(tl.int64)
    row = head_row(dq, token, head)
    for first in tl.static_range(0, QK_DIM, 64):
        column = first + tl.arange(0, 64)
        start = (head * tokens + token) * QK_DIM
        # 32 columns are stored as [4 threads, 2 groups of 16, 2 groups of 8, 2 adjacent columns].
        sums = tl.load(dq_sums + start[:, None] + column[None, :], mask=inside[:, None], other=0.0)
        sums = sums.reshape([TOKENS, 2, 4, 2, 2, 2]).permute((0, 1, 3, 4, 2, 5)).reshape([TOKENS, 64])
        result = (sums * softmax_scale).to(dq.start.dtype.element_ty)
        tl.store(row[:, None] + column[None, :], result, mask=inside[:, None])
