"""The forward kernel: a program computes the output of a tile of queries of one head."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import from_float32
from flashlatte.kernels.triton.online_softmax import LN_2, LOG2_E
from flashlatte.ops.dense_prefill.portable.tiles import (
    find_tile,
    load_parts,
    load_parts_and_dot,
    load_tile,
    phases,
    visible_range,
)
from flashlatte.runtime.triton_kernel import kernel


@triton.jit
def _masked(scores, key, lower, upper):
    """Scores [rows, keys], -inf where masked."""
    visible = (key[None, :] >= lower[:, None]) & (key[None, :] <= upper[:, None])
    return tl.where(visible, scores, float("-inf"))


@kernel(by_element=("cu_seqlens_q", "cu_seqlens_k"))
def forward_kernel(
    q,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    k,
    k_stride_token: tl.int64,
    k_stride_head: tl.int64,
    v,
    v_stride_token: tl.int64,
    v_stride_head: tl.int64,
    out,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    lse,
    lse_stride_token: tl.int64,
    lse_stride_head: tl.int64,
    cu_seqlens_q,
    cu_seqlens_k,
    requests: tl.int32,
    total_q: tl.int32,
    total_k: tl.int32,
    slots: tl.int32,
    group: tl.int32,
    window_left: tl.int32,
    window_right: tl.int32,
    softmax_scale: tl.float32,
    empty_lse: tl.float32,
    D: tl.constexpr,
    D_A: tl.constexpr,
    D_B: tl.constexpr,
    D_V: tl.constexpr,
    D_V_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    BRANCHES: tl.constexpr,
    ALIGN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Strides, except those of lse, are in units of ALIGN elements.

    The programs of a head have adjacent indices, so its keys stay in the L2 cache. The first programs of a request
    process its last queries, which have the most visible keys.
    """
    head = tl.program_id(0) // slots
    tile, tiles, q_begin, s_q, k_begin, s_k = find_tile(
        tl.program_id(0) % slots, cu_seqlens_q, cu_seqlens_k, requests, total_q, total_k, BLOCK_M
    )
    first = tl.where(tile < tiles, (tiles - 1 - tile) * BLOCK_M, s_q)
    shift = s_k - s_q
    begin, seen, full, partial, end = phases(first, s_q, s_k, shift, window_left, window_right, BLOCK_M, BLOCK_N)
    row = first + tl.arange(0, BLOCK_M)
    lower, upper = visible_range(row, s_k, shift, window_left, window_right)
    kv_head = (head // group).to(tl.int64)
    q += (q_begin.to(tl.int64) * q_stride_token + head.to(tl.int64) * q_stride_head) * ALIGN
    k += (k_begin.to(tl.int64) * k_stride_token + kv_head * k_stride_head) * ALIGN
    v += (k_begin.to(tl.int64) * v_stride_token + kv_head * v_stride_head) * ALIGN
    q_a, q_b = load_parts(q, q_stride_token, first, None, s_q, D, D_A, D_B, BLOCK_M, ALIGN, INTERPRETED)
    scale = softmax_scale * LOG2_E

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, D_V_PADDED], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        _, _, scores = load_parts_and_dot(
            q_a, q_b, k, k_stride_token, start, seen, end, D, D_A, D_B, BLOCK_N, ALIGN, INTERPRETED
        )  # scores [BLOCK_M, BLOCK_N]
        key = start + tl.arange(0, BLOCK_N)
        if BRANCHES:
            if (start < full) | (start >= partial):
                scores = _masked(scores, key, lower, upper)
        else:
            scores = _masked(scores, key, lower, upper)
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        subtracted = tl.where(new_max == float("-inf"), 0.0, new_max * scale)
        p = tl.exp2(scores * scale - subtracted[:, None])
        alpha = tl.exp2(row_max * scale - subtracted)
        row_sum = row_sum * alpha + tl.sum(p, axis=1)
        row_max = new_max
        value = load_tile(v, v_stride_token, start, seen, end, 0, D_V, D_V_PADDED, BLOCK_N, ALIGN, INTERPRETED)
        values = tl.dot(p.to(value.dtype), value, values * alpha[:, None])

    empty = row_sum == 0
    values *= (1.0 / tl.where(empty, 1.0, row_sum))[:, None]
    row_lse = tl.where(empty, empty_lse, (row_max * scale + tl.log2(tl.where(empty, 1.0, row_sum))) * LN_2)
    token = (q_begin + row).to(tl.int64)
    cols = tl.arange(0, D_V_PADDED)
    in_use = row < s_q
    tl.store(
        out + (token * out_stride_token + head * out_stride_head)[:, None] * ALIGN + cols[None, :],
        from_float32(values, out.dtype.element_ty, INTERPRETED),
        mask=in_use[:, None] & (cols < D_V)[None, :],
    )
    tl.store(lse + token * lse_stride_token + head * lse_stride_head, row_lse, mask=in_use)
