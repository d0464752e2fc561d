"""The forward kernel: a program computes the output of a tile of queries of one head."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.online_softmax import LN_2, LOG2_E, finish, softmax
from flashlatte.kernels.triton.rows import HeadRows, Window, head_row
from flashlatte.ops.dense_prefill.portable.tiles import (
    find_queries,
    load_parts,
    load_parts_and_dot,
    load_values,
    rows_of,
    store_columns,
)
from flashlatte.ops.dense_prefill.reference import DensePrefillRequests
from flashlatte.runtime.triton_kernel import kernel


@triton.jit
def _masked(scores, key, lower, upper):
    """Scores [rows, keys], -inf where masked."""
    visible = (key[None, :] >= lower[:, None]) & (key[None, :] <= upper[:, None])
    return tl.where(visible, scores, float("-inf"))


@kernel
def forward_kernel(
    q: HeadRows,
    k: HeadRows,
    v: HeadRows,
    out: HeadRows,
    lse: HeadRows,
    requests: DensePrefillRequests,
    window: Window,
    slots: tl.int32,
    group: tl.int32,
    softmax_scale: tl.float32,
    empty_lse: tl.float32,
    STEP: tl.constexpr,
):
    """``lse`` is [tokens, heads], with strides in elements. A key head has ``group`` query heads.

    The programs of a head have adjacent indices, so its keys stay in the L2 cache.
    """
    BLOCK_M: tl.constexpr = STEP.block_m
    BLOCK_N: tl.constexpr = STEP.block_n
    WIDTH_V: tl.constexpr = STEP.width_v
    head = tl.program_id(0) // slots
    queries = find_queries(tl.program_id(0) % slots, requests, window, STEP)
    kv_head = (head // group).to(tl.int64)
    q = rows_of(q, queries.q_begin, head.to(tl.int64))
    k = rows_of(k, queries.k_begin, kv_head)
    v = rows_of(v, queries.k_begin, kv_head)
    q_first, q_rest = load_parts(q, queries.first, None, queries.s_q, BLOCK_M, STEP)
    scale = softmax_scale * LOG2_E

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, WIDTH_V], tl.float32)
    for start in tl.range(queries.begin, queries.stop, BLOCK_N, num_stages=STEP.num_stages):
        _, _, scores = load_parts_and_dot(
            q_first, q_rest, k, start, queries.seen, queries.stop, BLOCK_N, STEP
        )  # scores [BLOCK_M, BLOCK_N]
        key = start + tl.arange(0, BLOCK_N)
        if STEP.branches:
            if (start < queries.full) | (start >= queries.partial):
                scores = _masked(scores, key, queries.lower, queries.upper)
        else:
            scores = _masked(scores, key, queries.lower, queries.upper)
        row_max, row_sum, alpha, p = softmax(row_max, row_sum, scores, scale)
        value = load_values(v, start, queries.seen, queries.stop, BLOCK_N, STEP)
        values = tl.dot(p.to(value.dtype), value, values * alpha[:, None])

    inverse, lse2 = finish(row_max, row_sum, scale)
    values *= inverse[:, None]
    row_lse = tl.where(lse2 == float("-inf"), empty_lse, lse2 * LN_2)
    token = queries.q_begin + queries.row
    in_use = queries.row < queries.s_q
    store_columns(head_row(out, token, head)[:, None], values, in_use, 0, STEP.head_dim_v)
    tl.store(head_row(lse, token, head), row_lse, mask=in_use)
