"""The kernel of dense decode: an online softmax over the pages of a request, for a block of its query rows.

A cache row is loaded once: whole it is a key, its first D_V numbers are the value. The queries of all tokens of a
request that share a kv head are rows of one matrix, so that a key is multiplied with all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kv_cache.triton_fp8 import e4m3_to_float, widen
from flashlatte.schedule import combine, device
from flashlatte.triton_kernel import kernel

_LOG2_E = tl.constexpr(1.4426950408889634)


class Queries(NamedTuple):
    """q [b, s_q, h_q, d], strides in units of Q_ALIGN numbers; ``heads`` of them share a kv head."""

    q: Any
    stride_request: Any
    stride_token: Any
    stride_head: Any
    tokens: Any
    heads: Any


class Cache(NamedTuple):
    """k_cache [pages, page_size, h_kv, d], strides in units of K_ALIGN numbers, and the pages of each request."""

    k_cache: Any
    stride_page: Any
    stride_token: Any
    stride_head: Any
    num_pages: Any
    block_table: Any
    stride_table: Any


@triton.jit
def _load_rows(base, offsets, in_use, FIRST: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Numbers FIRST to FIRST + COUNT of the rows at ``offsets``, as a [rows, WIDTH] tile; 0 where not in use."""
    cols = tl.arange(0, WIDTH)
    mask = in_use[:, None]
    if COUNT != WIDTH:
        mask = mask & (cols < COUNT)[None, :]
    return tl.load(base + offsets[:, None] + (FIRST + cols)[None, :], mask=mask, other=0)


@triton.jit
def _as_operand(x, dtype: tl.constexpr, NATIVE_FP8: tl.constexpr, PTX: tl.constexpr, INTERPRETED: tl.constexpr):
    """Cache numbers as a matrix operand in q's dtype; the interpreter multiplies only float32 rightly."""
    if x.dtype == tl.uint8:
        x = x.to(tl.float8e4nv, bitcast=True).to(dtype) if NATIVE_FP8 else e4m3_to_float(x, False).to(dtype)
        if PTX:
            # A move that Triton cannot see through. Else it moves the bytes into the layout of each of the two
            # products and converts them there, twice, and no longer copies tiles to shared memory ahead of use.
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return widen(x, INTERPRETED) if INTERPRETED else x


@triton.jit
def _load_pages(cache, item, keys, length, PAGE_SIZE: tl.constexpr):
    """Pages of ``keys`` (one key or a vector) as the block table has them; -1 for keys beyond the length."""
    entry = cache.block_table + item * cache.stride_table + keys // PAGE_SIZE
    return tl.load(entry, mask=keys < length, other=-1)


@triton.jit
def _locate(cache, pages, keys, kv_head, length, PAGE_SIZE: tl.constexpr, TOKEN_STRIDE: tl.constexpr):
    """Offsets of cache rows, and which of the keys exist: those within the length whose page is in the cache."""
    in_cache = (pages >= 0) & (pages < cache.num_pages)
    page_start = tl.where(in_cache, pages, 0).to(tl.int64) * cache.stride_page + kv_head * cache.stride_head
    return page_start + _token_offset(cache, keys % PAGE_SIZE, TOKEN_STRIDE), (keys < length) & in_cache


@triton.jit
def _token_offset(cache, token, TOKEN_STRIDE: tl.constexpr):
    if TOKEN_STRIDE is None:
        return token * cache.stride_token
    else:
        return token * TOKEN_STRIDE


@triton.jit
def _prefetch_rows(base, offsets, D: tl.constexpr):
    """Bring the cache rows at ``offsets`` to the L2 cache."""
    LINE: tl.constexpr = 1024 // base.dtype.element_ty.primitive_bitwidth
    lines = tl.minimum(tl.arange(0, 16), (D - 1) // LINE) * LINE
    lines = (base + offsets[:, None] + lines[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _opaque(x):
    """float32 x, in a way that Triton does not add up before the product that gave it."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _weigh(scores, visible_key, row_length, scale, peak, total, KEYS_FIRST: tl.constexpr):
    """A step of the online softmax: weights, what is kept of the sums so far, and the new peak and total."""
    row_axis: tl.constexpr = 1 if KEYS_FIRST else 0
    key_axis: tl.constexpr = 0 if KEYS_FIRST else 1
    scores = tl.where(
        tl.expand_dims(visible_key, row_axis) < tl.expand_dims(row_length, key_axis), scores, float("-inf")
    )
    new_peak = tl.maximum(peak, tl.max(scores, axis=key_axis))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) * scale
    weights = tl.exp2(scores * scale - tl.expand_dims(shift, key_axis))
    kept = tl.exp2(peak * scale - shift)
    return weights, kept, new_peak, total * kept + tl.sum(weights, axis=key_axis)


@triton.jit
def _attend(
    q_latent,
    q_rope,
    cache,
    item,
    kv_head,
    first_block,
    stop_block,
    length,
    row_length,
    scale,
    value_scale,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    K_ALIGN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    SHARE_SCORES: tl.constexpr,
    PREFETCH: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PTX: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Attention of query rows over blocks of keys: (values, base-2 lse of each row).

    Row r sees the keys below row_length[r]. ``scale`` includes log2(e). KEYS_FIRST: the scores are computed as
    [keys, rows] and the values as [LATENT, rows], so that few query rows are the short side of a matrix product.
    """
    BLOCK_H: tl.constexpr = q_latent.shape[0]
    PAGE_PER_BLOCK: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    key_axis: tl.constexpr = 0 if KEYS_FIRST else 1
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    values = tl.zeros([LATENT, BLOCK_H] if KEYS_FIRST else [BLOCK_H, LATENT], tl.float32)
    in_block = tl.arange(0, BLOCK_N)

    first_key = first_block * BLOCK_N
    pages = _load_pages(cache, item, first_key if PAGE_PER_BLOCK else first_key + in_block, length, PAGE_SIZE)
    for block in range(first_block, stop_block):
        first_key = block * BLOCK_N
        keys = first_key + in_block
        if PAGE_PER_BLOCK:
            offsets, exists = _locate(cache, pages, first_key, kv_head, length, PAGE_SIZE, TOKEN_STRIDE)
            offsets += _token_offset(cache, in_block, TOKEN_STRIDE)
            exists = exists & (keys < length)
        else:
            offsets, exists = _locate(cache, pages, keys, kv_head, length, PAGE_SIZE, TOKEN_STRIDE)
        offsets *= K_ALIGN
        latent = _load_rows(cache.k_cache, offsets, exists, 0, D_V, LATENT)
        latent = _as_operand(latent, q_latent.dtype, NATIVE_FP8, PTX, INTERPRETED)  # [BLOCK_N, LATENT]
        # The next block's pages are fetched one block ahead: the addresses of its rows wait for them.
        next_key = first_key + BLOCK_N
        pages = _load_pages(cache, item, next_key if PAGE_PER_BLOCK else next_key + in_block, length, PAGE_SIZE)

        if PREFETCH and PTX and PAGE_PER_BLOCK:
            next_offsets, _ = _locate(cache, pages, next_key, kv_head, length, PAGE_SIZE, TOKEN_STRIDE)
            _prefetch_rows(cache.k_cache, (next_offsets + _token_offset(cache, in_block, TOKEN_STRIDE)) * K_ALIGN, D)
        rope = latent
        if ROPE > 0:
            rope = _load_rows(cache.k_cache, offsets, exists, D_V, D - D_V, ROPE)
            rope = _as_operand(rope, q_latent.dtype, NATIVE_FP8, PTX, INTERPRETED)  # [BLOCK_N, ROPE]
        visible_key = tl.where(exists, keys, 0x7FFFFFFF)
        if SHARE_SCORES and PTX:
            # Always so. The product in a branch of its own is not seen to feed another one, for which Triton would
            # have every four warps compute all scores.
            weights = tl.zeros([BLOCK_H, BLOCK_N], latent.dtype)
            kept = tl.full([BLOCK_H], 1.0, tl.float32)
            if first_key < length:
                scores = _opaque(tl.dot(q_latent, tl.trans(latent)))
                if ROPE > 0:
                    scores += _opaque(tl.dot(q_rope, tl.trans(rope)))
                weights, kept, peak, total = _weigh(scores, visible_key, row_length, scale, peak, total, False)
                weights = weights.to(latent.dtype)
        else:
            if KEYS_FIRST:
                scores = tl.dot(latent, tl.trans(q_latent))
                scores = tl.dot(rope, tl.trans(q_rope), scores) if ROPE > 0 else scores
            else:
                scores = tl.dot(q_latent, tl.trans(latent))
                scores = tl.dot(q_rope, tl.trans(rope), scores) if ROPE > 0 else scores
            weights, kept, peak, total = _weigh(scores, visible_key, row_length, scale, peak, total, KEYS_FIRST)
            weights = weights.to(latent.dtype)
        values *= tl.expand_dims(kept, key_axis)
        values = tl.dot(tl.trans(latent), weights, values) if KEYS_FIRST else tl.dot(weights, latent, values)

    if KEYS_FIRST:
        values = tl.trans(values)
    lse2 = peak * scale + tl.log2(tl.where(total == 0, 1.0, total))
    return values * (value_scale / tl.where(total == 0, 1.0, total))[:, None], lse2


@kernel
def dense_decode_kernel(
    q,
    q_stride_request: tl.int64,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    k_cache,
    k_stride_page: tl.int64,
    k_stride_token: tl.int64,
    k_stride_head: tl.int64,
    num_pages: tl.int32,
    block_table,
    stride_table: tl.int64,
    cache_seqlens,
    stride_seqlens: tl.int64,
    limit: tl.int32,
    k_scale,
    k_scale_value: tl.float32,
    softmax_scale: tl.float32,
    causal: tl.int32,
    out,
    out_stride_request: tl.int64,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    lse,
    lse_stride_request: tl.int64,
    lse_stride_token: tl.int64,
    lse_stride_head: tl.int64,
    empty_lse: tl.float32,
    scratch,
    requests: tl.int32,
    heads: tl.int32,
    rows: tl.int32,
    num_groups: tl.int32,
    row_blocks: tl.int32,
    parts: tl.int32,
    first_request: tl.int32,
    D: tl.constexpr,
    D_V: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    SHARE_SCORES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    Q_ALIGN: tl.constexpr,
    K_ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    OVERHEAD: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PTX: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A program takes one part (SPLIT_BLOCKS None) or one of ``parts`` splits of a request, for one group of rows.

    A group is BLOCK_H of the ``rows`` = tokens · ``heads`` query rows of a kv head, which has ``row_blocks`` of them.
    The programs that read the same keys have adjacent numbers, so that the L2 cache serves all but the first.
    """
    cache = Cache(k_cache, k_stride_page, k_stride_token, k_stride_head, num_pages, block_table, stride_table)
    lists = device.KeyLists(requests, 1, cache_seqlens, stride_seqlens, 0, limit, None, 0, 0, None)
    outputs = combine.Outputs(
        out,
        out_stride_request,
        out_stride_token,
        out_stride_head,
        lse,
        lse_stride_request,
        lse_stride_token,
        lse_stride_head,
        None,
        0,
        1,
        heads,
        rows,
        empty_lse,
    )
    program = tl.program_id(0)
    group = program % num_groups
    unit = program // num_groups
    kv_head = group // row_blocks
    first_row = (group % row_blocks) * BLOCK_H
    row = first_row + tl.arange(0, BLOCK_H)
    token = row // heads
    q_row = token * q_stride_token + (kv_head * heads + row % heads) * q_stride_head
    in_rows = row < rows

    if k_scale is not None:
        k_scale_value = tl.load(k_scale)
    scale = softmax_scale * k_scale_value * _LOG2_E

    if SPLIT_BLOCKS is None:
        part = device.find_part(unit, parts, lists, BLOCK_N, OVERHEAD)
        first_item = part.first
        stop_item = part.stop
        cost = part.first_cost
    else:
        first_item = first_request + unit // parts
        stop_item = first_item + 1
    for item in range(first_item, stop_item):
        blocks = device.item_blocks(item, lists, BLOCK_N)
        if SPLIT_BLOCKS is None:
            first_block, stop_block = device.share(part, cost, blocks, OVERHEAD)
            cost += blocks + OVERHEAD
        else:
            split_size, _ = device.fixed_splits(blocks, SPLIT_BLOCKS, MAX_SPLITS)
            first_block = (unit % parts) * split_size
            stop_block = tl.minimum(first_block + split_size, blocks)
        if first_block < stop_block:
            q_offset = (item * q_stride_request + q_row) * Q_ALIGN
            q_latent = _load_rows(q, q_offset, in_rows, 0, D_V, LATENT)  # [BLOCK_H, LATENT]
            q_latent = widen(q_latent, INTERPRETED) if INTERPRETED else q_latent
            q_rope = q_latent
            if ROPE > 0:
                q_rope = _load_rows(q, q_offset, in_rows, D_V, D - D_V, ROPE)  # [BLOCK_H, ROPE]
                q_rope = widen(q_rope, INTERPRETED) if INTERPRETED else q_rope
            length = device.key_count(item, lists)
            values, lse2 = _attend(
                q_latent,
                q_rope,
                cache,
                item,
                kv_head,
                first_block,
                stop_block,
                length,
                length - causal * (rows // heads - 1 - token),
                scale,
                k_scale_value,
                BLOCK_N,
                D,
                D_V,
                LATENT,
                ROPE,
                K_ALIGN,
                PAGE_SIZE,
                TOKEN_STRIDE,
                KEYS_FIRST,
                SHARE_SCORES,
                PREFETCH,
                NATIVE_FP8,
                PTX,
                INTERPRETED,
            )
            cols = tl.arange(0, LATENT)
            if first_block == 0 and stop_block == blocks:
                combine.write_out(outputs, item, kv_head, row, cols, values, lse2, D_V, OUT_ALIGN, INTERPRETED)
                combine.write_lse(outputs, item, kv_head, row, lse2)
            elif scratch is not None:
                if SPLIT_BLOCKS is None:
                    record = device.part_record(unit, group, num_groups, first_block > 0)
                else:
                    record = device.fixed_record(unit // parts, unit % parts, group, num_groups, parts)
                combine.write_record(scratch, record, rows - first_row, values, lse2, cols, BLOCK_H, D_V)
