"""The backward pass in three kernels: row sums; dK and dV, one program per tile of keys; dQ, one program per tile of
queries. Both of the latter recompute P from lse, so no atomics are needed.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import from_float32, to_float32
from flashlatte.kernels.triton.online_softmax import LOG2_E
from flashlatte.ops.dense_prefill.portable.tiles import (
    find_tile,
    load_parts,
    load_parts_and_dot,
    load_tile,
    phases,
    seen_by_some,
    visible_range,
)
from flashlatte.runtime.triton_kernel import kernel


@kernel
def row_sums_kernel(
    out,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    dout,
    dout_stride_token: tl.int64,
    dout_stride_head: tl.int64,
    lse,
    lse_stride_token: tl.int64,
    lse_stride_head: tl.int64,
    dlse,
    dlse_stride_token: tl.int64,
    dlse_stride_head: tl.int64,
    sums,
    total_q: tl.int32,
    heads: tl.int32,
    D_V: tl.constexpr,
    D_V_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute lse in base 2 and Σ out · dout - dlse, interleaved [heads, total_q, 2]; +inf and 0 for rows without
    keys."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    token = (tl.program_id(0) // heads).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_use = token < total_q
    cols = tl.arange(0, D_V_PADDED)
    mask = in_use[:, None] & (cols < D_V)[None, :]
    out_offset = (token * out_stride_token + head * out_stride_head)[:, None] * ALIGN + cols[None, :]
    dout_offset = (token * dout_stride_token + head * dout_stride_head)[:, None] * ALIGN + cols[None, :]
    product = to_float32(tl.load(out + out_offset, mask=mask, other=0), INTERPRETED) * to_float32(
        tl.load(dout + dout_offset, mask=mask, other=0), INTERPRETED
    )
    row_lse = tl.load(lse + token * lse_stride_token + head * lse_stride_head, mask=in_use, other=0.0)
    row_delta = tl.sum(product, axis=1)
    if dlse is not None:
        row_delta -= tl.load(dlse + token * dlse_stride_token + head * dlse_stride_head, mask=in_use, other=0.0)
    empty = tl.abs(row_lse) == float("inf")
    pair = sums + (head * total_q + token) * 2
    tl.store(pair, tl.where(empty, float("inf"), row_lse * LOG2_E), mask=in_use)
    tl.store(pair + 1, tl.where(empty, 0.0, row_delta), mask=in_use)


@kernel(by_element=("cu_seqlens_q", "cu_seqlens_k"))
def keys_kernel(
    q,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    k,
    k_stride_token: tl.int64,
    k_stride_head: tl.int64,
    v,
    v_stride_token: tl.int64,
    v_stride_head: tl.int64,
    dout,
    dout_stride_token: tl.int64,
    dout_stride_head: tl.int64,
    dk,
    dk_stride_token: tl.int64,
    dk_stride_head: tl.int64,
    dv,
    dv_stride_token: tl.int64,
    dv_stride_head: tl.int64,
    sums,
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
    D: tl.constexpr,
    D_A: tl.constexpr,
    D_B: tl.constexpr,
    D_V: tl.constexpr,
    D_V_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Strides are in units of ALIGN elements."""
    kv_head = (tl.program_id(0) // slots).to(tl.int64)
    tile, tiles, k_begin, s_k, q_begin, s_q = find_tile(
        tl.program_id(0) % slots, cu_seqlens_k, cu_seqlens_q, requests, total_k, total_q, BLOCK_N
    )
    first = tl.where(tile < tiles, tile * BLOCK_N, s_k)
    shift = s_q - s_k
    begin, _, full, partial, end = phases(first, s_k, s_q, shift, window_right, window_left, BLOCK_N, BLOCK_M)
    key = first + tl.arange(0, BLOCK_N)
    lower, upper = visible_range(key, s_q, shift, window_right, window_left)
    k += (k_begin.to(tl.int64) * k_stride_token + kv_head * k_stride_head) * ALIGN
    v += (k_begin.to(tl.int64) * v_stride_token + kv_head * v_stride_head) * ALIGN
    # A key that is visible to no query has gradient 0, even if it is NaN.
    own_first, own_limit = seen_by_some(s_k, s_q, shift, window_right, window_left)
    k_a, k_b = load_parts(k, k_stride_token, first, own_first, own_limit, D, D_A, D_B, BLOCK_N, ALIGN, INTERPRETED)
    value = load_tile(v, v_stride_token, first, own_first, own_limit, 0, D_V, D_V_PADDED, BLOCK_N, ALIGN, INTERPRETED)
    scale = softmax_scale * LOG2_E

    dk_a = tl.zeros([BLOCK_N, D_A], tl.float32)
    dk_b = tl.zeros([BLOCK_N, D_B if D_B > 0 else 1], tl.float32)
    dvalue = tl.zeros([BLOCK_N, D_V_PADDED], tl.float32)
    of_pair = tl.arange(0, 2)[None, :]
    for member in range(0, group):
        head = kv_head * group + member
        head_q = q + (q_begin.to(tl.int64) * q_stride_token + head * q_stride_head) * ALIGN
        head_dout = dout + (q_begin.to(tl.int64) * dout_stride_token + head * dout_stride_head) * ALIGN
        head_sums = sums + (head * total_q + q_begin) * 2
        for start in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
            row = start + tl.arange(0, BLOCK_M)
            # Loaded as a tile: Triton would load two vectors in the layout of the scores' columns, by 4-byte loads in
            # each warp.
            pair = tl.load(head_sums + row[:, None] * 2 + of_pair, mask=(row < s_q)[:, None], other=0.0)
            row_lse = tl.max(tl.where(of_pair == 0, pair, float("-inf")), axis=1)
            row_delta = tl.sum(tl.where(of_pair == 1, pair, 0.0), axis=1)
            q_a, q_b, scores = load_parts_and_dot(
                k_a, k_b, head_q, q_stride_token, start, None, s_q, D, D_A, D_B, BLOCK_M, ALIGN, INTERPRETED
            )  # scores [BLOCK_N, BLOCK_M]
            drow = load_tile(
                head_dout, dout_stride_token, start, None, s_q, 0, D_V, D_V_PADDED, BLOCK_M, ALIGN, INTERPRETED
            )
            dp = tl.dot(value, tl.trans(drow))  # [BLOCK_N, BLOCK_M]
            p = tl.exp2(scores * scale - row_lse[None, :])
            if (start < full) | (start >= partial):
                visible = (row[None, :] >= lower[:, None]) & (row[None, :] <= upper[:, None])
                p = tl.where(visible, p, 0.0)
            ds = (p * (dp - row_delta[None, :])).to(q_a.dtype)
            dvalue = tl.dot(p.to(drow.dtype), drow, dvalue)
            dk_a = tl.dot(ds, q_a, dk_a)
            if D_B > 0:
                dk_b = tl.dot(ds, q_b, dk_b)

    token = (k_begin + key).to(tl.int64)
    in_use = key < s_k
    dk_offset = (token * dk_stride_token + kv_head * dk_stride_head)[:, None] * ALIGN
    dv_offset = (token * dv_stride_token + kv_head * dv_stride_head)[:, None] * ALIGN
    store_columns(dk + dk_offset, dk_a * softmax_scale, in_use, 0, min(D, D_A), INTERPRETED)
    if D_B > 0:
        store_columns(dk + dk_offset, dk_b * softmax_scale, in_use, D_A, D - D_A, INTERPRETED)
    store_columns(dv + dv_offset, dvalue, in_use, 0, D_V, INTERPRETED)


@kernel(by_element=("cu_seqlens_q", "cu_seqlens_k"))
def queries_kernel(
    q,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    k,
    k_stride_token: tl.int64,
    k_stride_head: tl.int64,
    v,
    v_stride_token: tl.int64,
    v_stride_head: tl.int64,
    dout,
    dout_stride_token: tl.int64,
    dout_stride_head: tl.int64,
    dq,
    dq_stride_token: tl.int64,
    dq_stride_head: tl.int64,
    sums,
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
    D: tl.constexpr,
    D_A: tl.constexpr,
    D_B: tl.constexpr,
    D_V: tl.constexpr,
    D_V_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Order of programs and strides as in the forward kernel."""
    head = tl.program_id(0) // slots
    tile, tiles, q_begin, s_q, k_begin, s_k = find_tile(
        tl.program_id(0) % slots, cu_seqlens_q, cu_seqlens_k, requests, total_q, total_k, BLOCK_M
    )
    first = tl.where(tile < tiles, (tiles - 1 - tile) * BLOCK_M, s_q)
    shift = s_k - s_q
    begin, seen, full, partial, end = phases(first, s_q, s_k, shift, window_left, window_right, BLOCK_M, BLOCK_N)
    row = first + tl.arange(0, BLOCK_M)
    in_use = row < s_q
    lower, upper = visible_range(row, s_k, shift, window_left, window_right)
    kv_head = (head // group).to(tl.int64)
    head = head.to(tl.int64)
    q += (q_begin.to(tl.int64) * q_stride_token + head * q_stride_head) * ALIGN
    dout += (q_begin.to(tl.int64) * dout_stride_token + head * dout_stride_head) * ALIGN
    k += (k_begin.to(tl.int64) * k_stride_token + kv_head * k_stride_head) * ALIGN
    v += (k_begin.to(tl.int64) * v_stride_token + kv_head * v_stride_head) * ALIGN
    q_a, q_b = load_parts(q, q_stride_token, first, None, s_q, D, D_A, D_B, BLOCK_M, ALIGN, INTERPRETED)
    drow = load_tile(dout, dout_stride_token, first, None, s_q, 0, D_V, D_V_PADDED, BLOCK_M, ALIGN, INTERPRETED)
    pair = sums + (head * total_q + q_begin + row) * 2
    row_lse = tl.load(pair, mask=in_use, other=float("inf"))
    row_delta = tl.load(pair + 1, mask=in_use, other=0.0)
    scale = softmax_scale * LOG2_E

    dq_a = tl.zeros([BLOCK_M, D_A], tl.float32)
    dq_b = tl.zeros([BLOCK_M, D_B if D_B > 0 else 1], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        k_a, k_b, scores = load_parts_and_dot(
            q_a, q_b, k, k_stride_token, start, seen, end, D, D_A, D_B, BLOCK_N, ALIGN, INTERPRETED
        )  # scores [BLOCK_M, BLOCK_N]
        value = load_tile(v, v_stride_token, start, seen, end, 0, D_V, D_V_PADDED, BLOCK_N, ALIGN, INTERPRETED)
        dp = tl.dot(drow, tl.trans(value))  # [BLOCK_M, BLOCK_N]
        p = tl.exp2(scores * scale - row_lse[:, None])
        if (start < full) | (start >= partial):
            key = (start + tl.arange(0, BLOCK_N))[None, :]
            p = tl.where((key >= lower[:, None]) & (key <= upper[:, None]), p, 0.0)
        ds = (p * (dp - row_delta[:, None])).to(k_a.dtype)
        dq_a = tl.dot(ds, k_a, dq_a)
        if D_B > 0:
            dq_b = tl.dot(ds, k_b, dq_b)

    token = (q_begin + row).to(tl.int64)
    dq_offset = (token * dq_stride_token + head * dq_stride_head)[:, None] * ALIGN
    store_columns(dq + dq_offset, dq_a * softmax_scale, in_use, 0, min(D, D_A), INTERPRETED)
    if D_B > 0:
        store_columns(dq + dq_offset, dq_b * softmax_scale, in_use, D_A, D - D_A, INTERPRETED)


@triton.jit
def store_columns(rows, tile, in_use, FIRST: tl.constexpr, COUNT: tl.constexpr, INTERPRETED: tl.constexpr):
    """Store a tile [rows, width] to elements FIRST to FIRST + COUNT of the rows at pointers ``rows`` [rows, 1]."""
    cols = tl.arange(0, tile.shape[1])
    mask = in_use[:, None] & (cols < COUNT)[None, :]
    tl.store(rows + (FIRST + cols)[None, :], from_float32(tile, rows.dtype.element_ty, INTERPRETED), mask=mask)
