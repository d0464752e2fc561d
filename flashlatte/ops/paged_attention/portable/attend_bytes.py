"""The main loop of paged attention over a cache of one-byte elements, for few queries: a warp per key head.

Keys and values are the rows of the MMAs, and queries their columns (8 are enough), so all rows of the tensor cores are
used, and a thread converts the elements that it loaded (``byte_operands``). A program processes adjacent key heads,
whose rows are contiguous in memory for each token. Scores have a scale, a window and a causal mask only; ``attend``
supports the other terms.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.online_softmax import within
from flashlatte.ops.paged_attention.portable.attend import P_SHIFT, load_pages
from flashlatte.ops.paged_attention.portable.byte_operands import key_operand, value_operand
from flashlatte.ops.paged_attention.portable.tiles import visible_range

_SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def _load_words(rows, page, token, offsets, in_cache, WORDS: tl.constexpr):
    """uint32 [heads, keys, WORDS] of rows ``offsets`` [keys] words after a token of a page; 0 where there is no
    key."""
    first = rows.start + (page * rows.stride_page + token * rows.stride_token) * 16  # [heads]
    words = first.to(tl.pointer_type(tl.uint32))[:, None, None] + tl.arange(0, WORDS)[None, None, :]
    return tl.load(words + offsets[None, :, None], mask=in_cache[None, :, None], other=0)


@triton.jit
def first_pages(table, tile, first_block, step: tl.constexpr):
    """``load_pages`` of a tile's block ``first_block``."""
    begin = (tile.first_key // step.block_n + first_block) * step.block_n
    return load_pages(table, tile.request.to(tl.int64), begin, tile, step)


@triton.jit
def attend_bytes(
    queries,
    inputs,
    tile,
    pages,
    first_block,
    stop_block,
    scale,
    K_FORM: tl.constexpr,
    V_FORM: tl.constexpr,
    step: tl.constexpr,
):
    """(values [rows, width_v], base-2 lse [rows]), as ``attend`` returns them; rows are grouped by key head.

    The dims of q are in the order of ``key_dims``. ``pages``: ``first_pages``. ``scale`` may be a scalar or one per
    row.
    """
    key_rows = inputs.k.cache
    value_rows = inputs.v.cache
    table = inputs.table
    HEADS: tl.constexpr = step.key_heads
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
    lower, upper = visible_range(tile.context + tile.own + queries.token, tile.stop_key, inputs.visible.window)
    request = tile.request.to(tl.int64)
    lower = tl.reshape(lower, [HEADS, 1, BLOCK_M])
    upper = tl.reshape(upper, [HEADS, 1, BLOCK_M])
    factor = tl.reshape(queries.inverse * scale, [HEADS, BLOCK_M])
    # It may be 0 for a row of zeros, and 0 times -inf would be NaN.
    factor = tl.where(tl.abs(factor) < _SMALLEST_NORMAL, _SMALLEST_NORMAL, factor)
    q_columns = tl.permute(tl.reshape(queries.first, [HEADS, BLOCK_M, step.head_dim]), (0, 2, 1))

    # For pages that are a multiple of a block, or blocks that are a multiple of a page. In words; the launcher ensures
    # that they fit 32 bits.
    in_page = in_block % PAGE_SIZE if BLOCK_N % PAGE_SIZE == 0 else in_block
    k_rows = in_page * (key_rows.stride_token * 4).to(tl.int32)
    v_rows = in_page * (value_rows.stride_token * 4).to(tl.int32)

    row_max = tl.full([HEADS, BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([HEADS, BLOCK_N, BLOCK_M], tl.float32)
    values = tl.zeros([HEADS, WIDTH_V, BLOCK_M], tl.float32)
    for start in tl.range(begin, stop, BLOCK_N, num_stages=step.num_stages):
        keys = start + in_block
        valid = within(pages, table.num_pages)
        in_cache = (keys >= tile.first_key) & (keys < tile.stop_key) & valid
        page = tl.where(valid, pages, 0).to(tl.uint32).to(tl.int64)
        if PAGE_PER_BLOCK:
            token = start % PAGE_SIZE
            k_offsets = k_rows
            v_offsets = v_rows
        else:
            token = 0
            k_offsets = page * (key_rows.stride_page * 4)
            v_offsets = page * (value_rows.stride_page * 4)
            if BLOCK_N % PAGE_SIZE == 0:
                k_offsets += k_rows
                v_offsets += v_rows
            else:
                k_offsets += keys % PAGE_SIZE * (key_rows.stride_token * 4)
                v_offsets += keys % PAGE_SIZE * (value_rows.stride_token * 4)
            page = 0
        k_words = _load_words(key_rows, page, token, k_offsets, in_cache, K_WORDS)
        scores = tl.dot(key_operand(k_words, K_FORM), q_columns)  # [HEADS, BLOCK_N, BLOCK_M]
        key = keys[None, :, None]
        visible = (key >= lower) & (key <= upper) & in_cache[None, :, None]
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max * factor)
        alpha = tl.exp2(row_max * factor - shift)
        p = tl.exp2(scores * factor[:, None, :] - (shift - P_SHIFT)[:, None, :])
        sums = sums * alpha[:, None, :] + p
        row_max = new_max
        v_words = _load_words(value_rows, page, token, v_offsets, in_cache, V_WORDS)
        v = value_operand(v_words, V_FORM)  # [HEADS, width_v, BLOCK_N]
        # The next block's pages are loaded one block ahead: the addresses of its rows depend on them.
        pages = load_pages(table, request, start + BLOCK_N, tile, step)
        values = tl.dot(v, p.to(v.dtype), values * alpha[:, None, :])
    row_sum = tl.sum(sums, axis=1)
    is_empty = row_sum == 0
    row_sum = tl.where(is_empty, 1.0, row_sum)
    lse2 = tl.where(is_empty, float("-inf"), row_max * factor + tl.log2(row_sum) - P_SHIFT)
    # Restore the order of dims: stores of scattered columns would be slower.
    values = tl.reshape(values * (1.0 / row_sum)[:, None, :], [HEADS, WIDTH_V // 8, 8, BLOCK_M])
    values = tl.reshape(tl.permute(values, (0, 3, 2, 1)), [HEADS * BLOCK_M, WIDTH_V])
    return values, tl.reshape(lse2, [HEADS * BLOCK_M])
