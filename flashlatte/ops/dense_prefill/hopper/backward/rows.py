"""Kernels before and after the main kernel: delta and lse of rows, and the conversion of dQ."""

from __future__ import annotations

import triton.language as tl

from flashlatte.runtime.triton_kernel import kernel

# Tokens of a head per program.
TOKENS = tl.constexpr(32)
# Semaphores that a program sets to 0 at a time.
SEMAPHORES = tl.constexpr(128)
LOG2E = tl.constexpr(1.4426950408889634)


@kernel
def prepare_kernel(
    out,
    out_token_stride: tl.int64,
    out_head_stride: tl.int64,
    dout,
    dout_token_stride: tl.int64,
    dout_head_stride: tl.int64,
    lse,
    lse_token_stride: tl.int64,
    lse_head_stride: tl.int64,
    dlse,
    dlse_token_stride: tl.int64,
    dlse_head_stride: tl.int64,
    row_lse,  # float32 [heads, tokens]
    delta,
    dq_sums,  # float32 [heads, tokens, d_qk]
    semaphores,  # int32 [heads, tiles_per_head], or None
    tokens: tl.int32,
    heads: tl.int32,
    tiles_per_head: tl.int32,
    OUT_ALIGN: tl.constexpr,
    DOUT_ALIGN: tl.constexpr,
    V_DIM: tl.constexpr,
    QK_DIM: tl.constexpr,
):
    """Compute delta = Σ out · dout - dlse and lse · log2 e (inf for rows without keys), and zero the sums of dQ."""
    # Adjacent programs process the heads of the same tokens, which are adjacent in memory.
    head = (tl.program_id(0) % heads).to(tl.int64)
    block = tl.program_id(0) // heads
    token = block * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    column = tl.arange(0, V_DIM)
    token = token.to(tl.int64)
    out_row = (token * out_token_stride + head * out_head_stride) * OUT_ALIGN
    dout_row = (token * dout_token_stride + head * dout_head_stride) * DOUT_ALIGN
    result = tl.load(out + out_row[:, None] + column[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    gradient = tl.load(dout + dout_row[:, None] + column[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    sums = tl.sum(result * gradient, 1)
    if dlse is not None:
        sums -= tl.load(dlse + token * dlse_token_stride + head * dlse_head_stride, mask=inside, other=0.0)
    natural = tl.load(lse + token * lse_token_stride + head * lse_head_stride, mask=inside, other=0.0)
    empty = tl.abs(natural) == float("inf")
    tl.store(delta + head * tokens + token, tl.where(empty, 0.0, sums), mask=inside)
    tl.store(row_lse + head * tokens + token, tl.where(empty, float("inf"), natural * LOG2E), mask=inside)
    for first in tl.static_range(0, QK_DIM, 64):
        sum_column = first + tl.arange(0, 64)
        start = (head * tokens + token) * QK_DIM
        zeros = tl.zeros([TOKENS, 64], tl.float32)
        tl.store(dq_sums + start[:, None] + sum_column[None, :], zeros, mask=inside[:, None])
    if semaphores is not None:
        blocks = tl.num_programs(0) // heads
        index = block * SEMAPHORES + tl.arange(0, SEMAPHORES)
        for _ in range(0, tl.cdiv(tiles_per_head, SEMAPHORES * blocks)):
            tl.store(semaphores + head * tiles_per_head + index, 0, mask=index < tiles_per_head)
            index += blocks * SEMAPHORES


@kernel
def finish_kernel(
    dq_sums,
    dq,
    dq_token_stride: tl.int64,
    dq_head_stride: tl.int64,
    tokens: tl.int32,
    heads: tl.int32,
    softmax_scale: tl.float32,
    DQ_ALIGN: tl.constexpr,
    QK_DIM: tl.constexpr,
):
    """Write dQ from its sums: undo the permutation of columns, scale, and cast."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    token = (tl.program_id(0) // heads) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    token = token.to(tl.int64)
    row = (token * dq_token_stride + head * dq_head_stride) * DQ_ALIGN
    for first in tl.static_range(0, QK_DIM, 64):
        column = first + tl.arange(0, 64)
        start = (head * tokens + token) * QK_DIM
        # 32 columns are stored as [4 threads, 2 groups of 16, 2 groups of 8, 2 adjacent columns].
        sums = tl.load(dq_sums + start[:, None] + column[None, :], mask=inside[:, None], other=0.0)
        sums = sums.reshape([TOKENS, 2, 4, 2, 2, 2]).permute((0, 1, 3, 4, 2, 5)).reshape([TOKENS, 64])
        result = (sums * softmax_scale).to(dq.dtype.element_ty)
        tl.store(dq + row[:, None] + column[None, :], result, mask=inside[:, None])
