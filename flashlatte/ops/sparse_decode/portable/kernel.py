"""The kernel of sparse decode: an online softmax over the cache tokens that a query token selected.

An item is a query token of a request; its keys are those of its list of indices, and after them those of its list
into the extra cache. A program works on a block of an item's heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.ops.sparse_decode.portable.tiles import Cache, load_packed, load_plain, unpack
from flashlatte.schedule import combine, device
from flashlatte.triton_attention import LOG2_E, load_rows, no_keys, normalize, weigh
from flashlatte.triton_kernel import kernel


@triton.jit
def _attend(
    peak,
    total,
    values,
    q_latent,
    q_rope,
    cache,
    indices,
    first_block,
    stop_block,
    length,
    scale,
    FORMAT: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WARPGROUPS: tl.constexpr,
    VALUES_FIRST: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    PTX: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The state after blocks first to stop (exclusive) of a list of ``length`` indices."""
    MODEL1: tl.constexpr = FORMAT == "model1"
    in_tile = tl.arange(0, BLOCK_N)
    begin = first_block * BLOCK_N
    stop = tl.minimum(stop_block * BLOCK_N, length)
    if FORMAT == "plain":
        for start in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
            index = tl.load(indices + tl.minimum(start + in_tile, stop - 1))
            latent, rope, valid = load_plain(
                cache, index, in_tile < stop - start, D, D_V, LATENT, ROPE, PAGE_SIZE, WIDE, ALIGN, INTERPRETED
            )
            peak, total, values = weigh(
                peak,
                total,
                values,
                q_latent,
                q_rope,
                latent,
                rope,
                valid,
                scale,
                start,
                stop,
                ROPE,
                WARPGROUPS,
                VALUES_FIRST,
            )
    else:
        # A tile passes through registers anyway, to be unpacked: there the next one waits, and no room in shared
        # memory is needed for it.
        index = tl.load(indices + begin + in_tile, mask=begin + in_tile < stop, other=-1)
        words, scales, packed_rope, next_valid = load_packed(cache, index, MODEL1, PAGE_SIZE, WIDE, ALIGN)
        index = tl.load(indices + begin + BLOCK_N + in_tile, mask=begin + BLOCK_N + in_tile < stop, other=-1)
        for start in tl.range(begin, stop, BLOCK_N, num_stages=1):
            latent, rope = unpack(words, scales, packed_rope, q_latent.dtype, MODEL1, PTX, INTERPRETED)
            valid = next_valid
            words, scales, packed_rope, next_valid = load_packed(cache, index, MODEL1, PAGE_SIZE, WIDE, ALIGN)
            position = start + 2 * BLOCK_N + in_tile
            index = tl.load(indices + position, mask=position < stop, other=-1)
            if not WARPGROUPS:
                # Else the loads of the queries from shared memory, which wait for nothing, are all done before the
                # barrier that the keys need, and fill the registers.
                tl.debug_barrier()
            peak, total, values = weigh(
                peak,
                total,
                values,
                q_latent,
                q_rope,
                latent,
                rope,
                valid,
                scale,
                start,
                stop,
                ROPE,
                WARPGROUPS,
                VALUES_FIRST,
            )
    return peak, total, values


@kernel
def sparse_decode_kernel(
    q,
    q_stride_request: tl.int64,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    k_cache,
    k_stride_page: tl.int64,
    k_stride_token: tl.int64,
    num_slots: tl.int64,
    indices,
    indices_stride_request: tl.int64,
    indices_stride_token: tl.int64,
    extra_k_cache,
    extra_k_stride_page: tl.int64,
    extra_k_stride_token: tl.int64,
    extra_num_slots: tl.int64,
    extra_indices,
    extra_indices_stride_request: tl.int64,
    extra_indices_stride_token: tl.int64,
    num_items: tl.int32,
    tokens: tl.int32,
    lengths,
    lengths_stride_request: tl.int64,
    lengths_stride_token: tl.int64,
    topk: tl.int32,
    extra_lengths,
    extra_lengths_stride_request: tl.int64,
    extra_lengths_stride_token: tl.int64,
    extra_topk: tl.int32,
    softmax_scale: tl.float32,
    out,
    out_stride_request: tl.int64,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    lse,
    lse_stride_request: tl.int64,
    lse_stride_token: tl.int64,
    lse_stride_head: tl.int64,
    attn_sink,
    sink_stride: tl.int64,
    heads: tl.int32,
    empty_lse: tl.float32,
    scratch,
    num_groups: tl.int32,
    parts: tl.int32,
    FORMAT: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    LATENT_COLS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WARPGROUPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    EXTRA_PAGE_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    EXTRA_WIDE: tl.constexpr,
    Q_ALIGN: tl.constexpr,
    K_ALIGN: tl.constexpr,
    EXTRA_K_ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    OVERHEAD: tl.constexpr,
    BALANCED: tl.constexpr,
    PTX: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A program takes one part of all items' keys (BALANCED), or an item, for one group of heads.

    A group is BLOCK_H heads; the first LATENT_COLS columns of a row are its latent part. The programs of an item's
    groups have adjacent numbers, so that the L2 cache serves all but the first.
    """
    HAS_EXTRA: tl.constexpr = extra_k_cache is not None
    VALUES_FIRST: tl.constexpr = WARPGROUPS and FORMAT == "plain"
    cache = Cache(k_cache, k_stride_page, k_stride_token, num_slots)
    extra_cache = Cache(extra_k_cache, extra_k_stride_page, extra_k_stride_token, extra_num_slots)
    lists = device.KeyLists(
        num_items,
        tokens,
        lengths,
        lengths_stride_request,
        lengths_stride_token,
        topk,
        extra_lengths,
        extra_lengths_stride_request,
        extra_lengths_stride_token,
        extra_topk if HAS_EXTRA else None,
    )
    outputs = combine.Outputs(
        out,
        out_stride_request,
        out_stride_token,
        out_stride_head,
        lse,
        lse_stride_request,
        lse_stride_token,
        lse_stride_head,
        attn_sink,
        sink_stride,
        tokens,
        heads,
        heads,
        empty_lse,
    )
    group = tl.program_id(0) % num_groups
    unit = tl.program_id(0) // num_groups
    head = group * BLOCK_H + tl.arange(0, BLOCK_H)
    in_heads = head < heads
    scale = softmax_scale * LOG2_E

    first_item = unit
    stop_item = unit + 1
    if BALANCED:
        part = device.find_part(unit, parts, lists, BLOCK_N, OVERHEAD)
        first_item = part.first
        stop_item = part.stop
        cost = part.first_cost
    for item in range(first_item, stop_item):
        blocks = device.item_blocks(item, lists, BLOCK_N)
        first_block = 0
        stop_block = blocks
        if BALANCED:
            first_block, stop_block = device.share(part, cost, blocks, OVERHEAD)
            cost += blocks + OVERHEAD
        if first_block < stop_block:
            request = item // tokens
            token = item % tokens
            q_offset = (request * q_stride_request + token * q_stride_token + head * q_stride_head) * Q_ALIGN
            q_latent = load_rows(q, q_offset, in_heads, 0, LATENT_COLS, LATENT, INTERPRETED)  # [BLOCK_H, LATENT]
            q_rope = q_latent
            if ROPE > 0:
                q_rope = load_rows(q, q_offset, in_heads, LATENT_COLS, D - LATENT_COLS, ROPE, INTERPRETED)
            length = device.key_count(item, lists)
            peak, total, values = no_keys(BLOCK_H, LATENT, VALUES_FIRST)
            peak, total, values = _attend(
                peak,
                total,
                values,
                q_latent,
                q_rope,
                cache,
                indices + request * indices_stride_request + token * indices_stride_token,
                first_block,
                stop_block,
                length,
                scale,
                FORMAT,
                D,
                D_V,
                LATENT,
                ROPE,
                BLOCK_N,
                STAGES,
                WARPGROUPS,
                VALUES_FIRST,
                PAGE_SIZE,
                WIDE,
                K_ALIGN,
                PTX,
                INTERPRETED,
            )
            if HAS_EXTRA:
                before = tl.cdiv(length, BLOCK_N)
                peak, total, values = _attend(
                    peak,
                    total,
                    values,
                    q_latent,
                    q_rope,
                    extra_cache,
                    extra_indices + request * extra_indices_stride_request + token * extra_indices_stride_token,
                    tl.maximum(first_block - before, 0),
                    tl.maximum(stop_block - before, 0),
                    device.extra_key_count(item, lists),
                    scale,
                    FORMAT,
                    D,
                    D_V,
                    LATENT,
                    ROPE,
                    BLOCK_N,
                    STAGES,
                    WARPGROUPS,
                    VALUES_FIRST,
                    EXTRA_PAGE_SIZE,
                    EXTRA_WIDE,
                    EXTRA_K_ALIGN,
                    PTX,
                    INTERPRETED,
                )
            values, lse2 = normalize(peak, total, values, scale, VALUES_FIRST)
            cols = tl.arange(0, LATENT)
            if first_block == 0 and stop_block == blocks:
                combine.write_out(outputs, item, 0, head, cols, values, lse2, D_V, OUT_ALIGN, INTERPRETED)
                combine.write_lse(outputs, item, 0, head, lse2)
            elif scratch is not None:
                record = device.part_record(unit, group, num_groups, first_block > 0)
                combine.write_record(scratch, record, heads - group * BLOCK_H, values, lse2, cols, BLOCK_H, D_V)
