"""The backward pass in three kernels: row sums; dK and dV, one program per tile of keys; dQ, one program per tile of
queries. Both of the latter recompute P from lse, so no atomics are needed.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton.language as tl

from flashlatte.kernels.triton.fp8 import to_float32
from flashlatte.kernels.triton.online_softmax import LOG2_E
from flashlatte.kernels.triton.rows import HeadRows, Window, head_row
from flashlatte.ops.dense_prefill.portable.tiles import (
    find_queries,
    find_tile,
    load_parts,
    load_parts_and_dot,
    load_values,
    phases,
    rows_of,
    seen_by_some,
    store_columns,
    store_parts,
    visible_range,
)
from flashlatte.ops.dense_prefill.reference import DensePrefillRequests
from flashlatte.runtime.triton_kernel import kernel


@kernel
def row_sums_kernel(
    out: HeadRows,
    dout: HeadRows,
    lse: HeadRows,
    dlse: HeadRows,
    sums,
    total_q: tl.int32,
    heads: tl.int32,
    D_V: tl.constexpr,
    WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute lse in base 2 and Σ out · dout - dlse, interleaved [heads, total_q, 2]; +inf and 0 for rows without
    keys."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    token = (tl.program_id(0) // heads).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_use = token < total_q
    cols = tl.arange(0, WIDTH_V)
    mask = in_use[:, None] & (cols < D_V)[None, :]
    x = to_float32(tl.load(head_row(out, token, head)[:, None] + cols[None, :], mask=mask, other=0))
    product = x * to_float32(tl.load(head_row(dout, token, head)[:, None] + cols[None, :], mask=mask, other=0))
    # Before the sum, so that all loads are in flight together.
    row_lse = tl.load(head_row(lse, token, head), mask=in_use, other=0.0)
    delta = tl.sum(product, axis=1)
    if dlse.start is not None:
        delta -= tl.load(head_row(dlse, token, head), mask=in_use, other=0.0)
    empty = tl.abs(row_lse) == float("inf")
    pair = sums + (head * total_q + token) * 2
    tl.store(pair, tl.where(empty, float("inf"), row_lse * LOG2_E), mask=in_use)
    tl.store(pair + 1, tl.where(empty, 0.0, delta), mask=in_use)


@kernel
def keys_kernel(
    q: HeadRows,
    k: HeadRows,
    v: HeadRows,
    dout: HeadRows,
    dk: HeadRows,
    dv: HeadRows,
    requests: DensePrefillRequests,
    window: Window,
    sums,
    slots: tl.int32,
    group: tl.int32,
    softmax_scale: tl.float32,
    STEP: tl.constexpr,
):
    """dK and dV of a tile of keys of a key head, from all queries of its ``group`` query heads."""
    BLOCK_M: tl.constexpr = STEP.block_m
    BLOCK_N: tl.constexpr = STEP.block_n
    FIRST: tl.constexpr = STEP.first
    REST: tl.constexpr = STEP.rest
    WIDTH_V: tl.constexpr = STEP.width_v
    kv_head = (tl.program_id(0) // slots).to(tl.int64)
    tile, tiles, k_begin, s_k, q_begin, s_q = find_tile(
        tl.program_id(0) % slots,
        requests.cu_seqlens_k,
        requests.cu_seqlens_q,
        requests.count,
        requests.total_k,
        requests.total_q,
        BLOCK_N,
    )
    first = tl.where(tile < tiles, tile * BLOCK_N, s_k)
    shift = s_q - s_k
    begin, seen, full, partial, end = phases(first, s_k, s_q, shift, window.right, window.left, BLOCK_N, BLOCK_M)
    key = first + tl.arange(0, BLOCK_N)
    lower, upper = visible_range(key, s_q, shift, window.right, window.left)
    k = rows_of(k, k_begin, kv_head)
    v = rows_of(v, k_begin, kv_head)
    # A key that is visible to no query has gradient 0, even if it is NaN.
    own_first, own_limit = seen_by_some(s_k, s_q, shift, window.right, window.left)
    k_first, k_rest = load_parts(k, first, own_first, own_limit, BLOCK_N, STEP)
    value = load_values(v, first, own_first, own_limit, BLOCK_N, STEP)
    scale = softmax_scale * LOG2_E

    dk_first = tl.zeros([BLOCK_N, FIRST], tl.float32)
    dk_rest = tl.zeros([BLOCK_N, REST if REST > 0 else 1], tl.float32)
    dvalue = tl.zeros([BLOCK_N, WIDTH_V], tl.float32)
    of_pair = tl.arange(0, 2)[None, :]
    for member in range(0, group):
        head = kv_head * group + member
        head_q = rows_of(q, q_begin, head)
        head_dout = rows_of(dout, q_begin, head)
        head_sums = sums + (head * requests.total_q + q_begin) * 2
        for start in tl.range(begin, end, BLOCK_M, num_stages=STEP.num_stages):
            row = start + tl.arange(0, BLOCK_M)
            # Loaded as a tile: Triton would load two vectors in the layout of the scores' columns, by 4-byte loads in
            # each warp.
            pair = tl.load(head_sums + row[:, None] * 2 + of_pair, mask=(row < s_q)[:, None], other=0.0)
            row_lse = tl.max(tl.where(of_pair == 0, pair, float("-inf")), axis=1)
            row_delta = tl.sum(tl.where(of_pair == 1, pair, 0.0), axis=1)
            # Queries before ``seen`` have no visible key: NaN in them and in their dout must not reach a gradient.
            q_first, q_rest, scores = load_parts_and_dot(
                k_first, k_rest, head_q, start, seen, end, BLOCK_M, STEP
            )  # scores [BLOCK_N, BLOCK_M]
            drow = load_values(head_dout, start, seen, end, BLOCK_M, STEP)
            dp = tl.dot(value, tl.trans(drow))  # [BLOCK_N, BLOCK_M]
            p = tl.exp2(scores * scale - row_lse[None, :])
            if (start < full) | (start >= partial):
                visible = (row[None, :] >= lower[:, None]) & (row[None, :] <= upper[:, None])
                p = tl.where(visible, p, 0.0)
            ds = (p * (dp - row_delta[None, :])).to(q_first.dtype)
            dvalue = tl.dot(p.to(drow.dtype), drow, dvalue)
            dk_first = tl.dot(ds, q_first, dk_first)
            if REST > 0:
                dk_rest = tl.dot(ds, q_rest, dk_rest)

    token = k_begin + key
    in_use = key < s_k
    dk_rows, dv_rows = head_row(dk, token, kv_head)[:, None], head_row(dv, token, kv_head)[:, None]
    store_parts(dk_rows, dk_first, dk_rest, softmax_scale, in_use, STEP)
    store_columns(dv_rows, dvalue, in_use, 0, STEP.head_dim_v)


@kernel
def queries_kernel(
    q: HeadRows,
    k: HeadRows,
    v: HeadRows,
    dout: HeadRows,
    dq: HeadRows,
    requests: DensePrefillRequests,
    window: Window,
    sums,
    slots: tl.int32,
    group: tl.int32,
    softmax_scale: tl.float32,
    STEP: tl.constexpr,
):
    """dQ of a tile of queries; the order of programs is that of the forward kernel."""
    BLOCK_M: tl.constexpr = STEP.block_m
    BLOCK_N: tl.constexpr = STEP.block_n
    FIRST: tl.constexpr = STEP.first
    REST: tl.constexpr = STEP.rest
    head = tl.program_id(0) // slots
    queries = find_queries(tl.program_id(0) % slots, requests, window, STEP)
    first = queries.first
    in_use = queries.row < queries.s_q
    kv_head = (head // group).to(tl.int64)
    head = head.to(tl.int64)
    q = rows_of(q, queries.q_begin, head)
    dout = rows_of(dout, queries.q_begin, head)
    k = rows_of(k, queries.k_begin, kv_head)
    v = rows_of(v, queries.k_begin, kv_head)
    q_first, q_rest = load_parts(q, first, None, queries.s_q, BLOCK_M, STEP)
    # A query without a visible key has gradient 0, even if its dout is NaN.
    own_first, own_limit = seen_by_some(queries.s_q, queries.s_k, queries.s_k - queries.s_q, window.left, window.right)
    drow = load_values(dout, first, own_first, own_limit, BLOCK_M, STEP)
    pair = sums + (head * requests.total_q + queries.q_begin + queries.row) * 2
    row_lse = tl.load(pair, mask=in_use, other=float("inf"))
    row_delta = tl.load(pair + 1, mask=in_use, other=0.0)
    scale = softmax_scale * LOG2_E

    dq_first = tl.zeros([BLOCK_M, FIRST], tl.float32)
    dq_rest = tl.zeros([BLOCK_M, REST if REST > 0 else 1], tl.float32)
    for start in tl.range(queries.begin, queries.stop, BLOCK_N, num_stages=STEP.num_stages):
        k_first, k_rest, scores = load_parts_and_dot(
            q_first, q_rest, k, start, queries.seen, queries.stop, BLOCK_N, STEP
        )  # scores [BLOCK_M, BLOCK_N]
        value = load_values(v, start, queries.seen, queries.stop, BLOCK_N, STEP)
        dp = tl.dot(drow, tl.trans(value))  # [BLOCK_M, BLOCK_N]
        p = tl.exp2(scores * scale - row_lse[:, None])
        if (start < queries.full) | (start >= queries.partial):
            key = (start + tl.arange(0, BLOCK_N))[None, :]
            p = tl.where((key >= queries.lower[:, None]) & (key <= queries.upper[:, None]), p, 0.0)
        ds = (p * (dp - row_delta[:, None])).to(k_first.dtype)
        dq_first = tl.dot(ds, k_first, dq_first)
        if REST > 0:
            dq_rest = tl.dot(ds, k_rest, dq_rest)

    dq_rows = head_row(dq, queries.q_begin + queries.row, head)[:, None]
    store_parts(dq_rows, dq_first, dq_rest, softmax_scale, in_use, STEP)
