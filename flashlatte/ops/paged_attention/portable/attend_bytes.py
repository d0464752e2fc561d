"""The loop of paged attention over a cache of one byte a number, for few queries: a warp keeps to itself.

Keys and values are the rows of the products, and queries their columns, of which there may be 8; so no row of tensor
cores idles, and each number that is loaded is converted in the thread that loaded it (``byte_operands``). What scores
can have beside a scale, a window and the causal edge is ``attend``'s.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.online_softmax import within
from flashlatte.ops.paged_attention.portable.attend import P_SHIFT, load_pages
from flashlatte.ops.paged_attention.portable.byte_operands import key_operand, value_operand
from flashlatte.ops.paged_attention.portable.tiles import seen_by

_SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def _load_words(rows, page, token, behind, in_cache, WORDS: tl.constexpr):
    """uint32 [keys, WORDS] of the rows ``behind`` [keys] words behind a token of a page; 0 where there is no key."""
    first = rows.cache + (page * rows.stride_page + token * rows.stride_token) * 16
    words = first.to(tl.pointer_type(tl.uint32)) + behind[:, None] + tl.arange(0, WORDS)[None, :]
    return tl.load(words, mask=in_cache[:, None], other=0)


@triton.jit
def attend_bytes(
    q,
    q_inverse,
    keys_of,
    values_of,
    table,
    terms,
    tile,
    row_token,
    first_block,
    stop_block,
    scale,
    K_FORM: tl.constexpr,
    V_FORM: tl.constexpr,
    step: tl.constexpr,
):
    """(values [BLOCK_M, width_v] in the order of ``value_dims``, base-2 lse [BLOCK_M]), as ``attend`` has them.

    ``q`` [BLOCK_M, head_dim] has its dims in the order of ``key_dims``.
    """
    BLOCK_M: tl.constexpr = step.block_m
    BLOCK_N: tl.constexpr = step.block_n
    WIDTH_V: tl.constexpr = step.width_v
    K_WORDS: tl.constexpr = step.head_dim // 4
    V_WORDS: tl.constexpr = step.head_dim_v // 4
    PAGE_SIZE: tl.constexpr = step.page_size
    PAGE_PER_BLOCK: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    in_block = tl.arange(0, BLOCK_N)
    origin = tile.first_key // BLOCK_N * BLOCK_N
    begin = origin + first_block * BLOCK_N
    stop = tl.minimum(origin + stop_block * BLOCK_N, tile.stop_key)
    lower, upper = seen_by(tile.context + tile.own + row_token, tile.stop_key, terms.window_left, terms.window_right)
    request = tile.request.to(tl.int64)
    factor = q_inverse * scale  # [BLOCK_M]
    # Of a row of zeros it may be 0, and times -inf NaN.
    factor = tl.where(tl.abs(factor) < _SMALLEST_NORMAL, _SMALLEST_NORMAL, factor)
    q_columns = tl.trans(q)  # [head_dim, BLOCK_M]

    # In words, which fit 32 bits: the launcher sees to it.
    k_rows = in_block * (keys_of.stride_token * 4).to(tl.int32)
    v_rows = in_block * (values_of.stride_token * 4).to(tl.int32)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    values = tl.zeros([WIDTH_V, BLOCK_M], tl.float32)
    pages = load_pages(table, request, begin, tile, step)
    for start in tl.range(begin, stop, BLOCK_N, num_stages=step.num_stages):
        keys = start + in_block
        valid = within(pages, table.num_pages)
        in_cache = (keys >= tile.first_key) & (keys < tile.stop_key) & valid
        page = tl.where(valid, pages, 0).to(tl.int64)
        if PAGE_PER_BLOCK:
            token = start % PAGE_SIZE
            k_behind = k_rows
            v_behind = v_rows
        else:
            token = 0
            k_behind = (page * keys_of.stride_page + keys % PAGE_SIZE * keys_of.stride_token) * 4
            v_behind = (page * values_of.stride_page + keys % PAGE_SIZE * values_of.stride_token) * 4
            page = 0
        k_words = _load_words(keys_of, page, token, k_behind, in_cache, K_WORDS)
        scores = tl.dot(key_operand(k_words, K_FORM), q_columns)  # [BLOCK_N, BLOCK_M]
        visible = (keys[:, None] >= lower[None, :]) & (keys[:, None] <= upper[None, :]) & in_cache[:, None]
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max * factor)
        alpha = tl.exp2(row_max * factor - shift)
        p = tl.exp2(scores * factor[None, :] - (shift - P_SHIFT)[None, :])
        sums = sums * alpha[None, :] + p
        row_max = new_max
        v_words = _load_words(values_of, page, token, v_behind, in_cache, V_WORDS)
        v = value_operand(v_words, V_FORM)  # [width_v, BLOCK_N]
        # The next block's pages are fetched one block ahead: the addresses of its rows wait for them.
        pages = load_pages(table, request, start + BLOCK_N, tile, step)
        values = tl.dot(v, p.to(v.dtype), values * alpha[None, :])
    row_sum = tl.sum(sums, axis=0)
    is_empty = row_sum == 0
    row_sum = tl.where(is_empty, 1.0, row_sum)
    lse2 = tl.where(is_empty, float("-inf"), row_max * factor + tl.log2(row_sum) - P_SHIFT)
    return tl.trans(values * (1.0 / row_sum)[None, :]), lse2
