"""The kernel of sparse decode: an online softmax over the cache tokens that are selected for a query token.

A work item is a query token of a request; its keys are those of its indices, followed by those of its indices into the
extra cache. A CTA processes a group of a work item's heads.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.online_softmax import (
    LOG2_E,
    attend,
    empty_state,
    load_query,
    load_tile,
    no_prefetch,
    normalize,
)
from flashlatte.kernels.triton.rows import BatchQuery, QueryRopeRows
from flashlatte.ops.sparse_decode.portable.staged import dequantize, load_codes, load_scales
from flashlatte.ops.sparse_decode.portable.tiles import SparseCache, load_packed, locate_rows, unpack
from flashlatte.runtime.kernel_records import Int64, Pointer
from flashlatte.runtime.triton_kernel import kernel
from flashlatte.split_kv import device
from flashlatte.split_kv.device import KeyLengths, SplitGrid
from flashlatte.split_kv.outputs import Outputs
from flashlatte.split_kv.work import GroupRows, find_work, split_of, write_metadata, write_result


class SelectedSlots(NamedTuple):
    """The selected tokens of a cache: ``indices`` is the first index of a list."""

    cache: Any
    indices: Any


@triton.jit
def _load_indices(tokens, start, stop, step: tl.constexpr):
    """The indices of the tile at ``start``; -1 beyond the list."""
    position = start + tl.arange(0, step.block_n)
    return tl.load(tokens.indices + position, mask=position < stop, other=-1)


@triton.jit
def _load_rows(tokens, ahead, start, stop, dtype: tl.constexpr, cache_layout: tl.constexpr, step: tl.constexpr):
    """LOAD of ``attend`` for a cache without scales."""
    in_tile = tl.arange(0, step.block_n)
    index = tl.load(tokens.indices + tl.minimum(start + in_tile, stop - 1))
    valid, rows = locate_rows(tokens.cache, index, cache_layout)
    valid = valid & (in_tile < stop - start)
    return load_tile(tokens.cache.k_cache, rows, valid, step), valid[None, :], ahead


@triton.jit
def _prefetch_scales(tokens, begin, stop, cache_layout: tl.constexpr, step: tl.constexpr):
    """PREFETCH of ``_load_codes``: the scales of the first tile, and the indices of the next."""
    scales = load_scales(tokens.cache, _load_indices(tokens, begin, stop, step), cache_layout)
    return _load_indices(tokens, begin + step.block_n, stop, step), scales


@triton.jit
def _load_codes(tokens, ahead, start, stop, dtype: tl.constexpr, cache_layout: tl.constexpr, step: tl.constexpr):
    """LOAD of ``attend`` for e4m3 tokens, which are prefetched to shared memory; their scales and indices are carried
    in registers."""
    index, scales = ahead
    in_tile = tl.arange(0, step.block_n)
    codes = load_codes(tokens.cache, tl.load(tokens.indices + tl.minimum(start + in_tile, stop - 1)), cache_layout)
    valid = codes.valid & (in_tile < stop - start)
    keys = dequantize(codes, scales, dtype, cache_layout, step)
    scales = load_scales(tokens.cache, index, cache_layout)
    return keys, valid[None, :], (_load_indices(tokens, start + 2 * step.block_n, stop, step), scales)


@triton.jit
def _prefetch_packed(tokens, begin, stop, cache_layout: tl.constexpr, step: tl.constexpr):
    """PREFETCH of ``_load_packed``: the first tile, and the indices of the next."""
    packed = load_packed(tokens.cache, _load_indices(tokens, begin, stop, step), cache_layout)
    return _load_indices(tokens, begin + step.block_n, stop, step), packed


@triton.jit
def _load_packed(tokens, ahead, start, stop, dtype: tl.constexpr, cache_layout: tl.constexpr, step: tl.constexpr):
    """LOAD of ``attend`` for a cache with scales. Tiles are dequantized in registers anyway, so the next tile is
    prefetched to registers and needs no shared memory."""
    index, packed = ahead
    keys = unpack(packed, dtype, cache_layout, step)
    valid = packed.valid
    packed = load_packed(tokens.cache, index, cache_layout)
    index = _load_indices(tokens, start + 2 * step.block_n, stop, step)
    if not step.warpgroups:
        # Without this, all loads of the queries from shared memory are scheduled before the keys' barrier, and fill the
        # registers.
        tl.debug_barrier()
    return keys, valid[None, :], (index, packed)


@triton.jit
def _attend_blocks(
    state, q, tokens, first_block, stop_block, length, scale, cache_layout: tl.constexpr, step: tl.constexpr
):
    """The state after blocks first to stop (exclusive) of a list of ``length`` indices."""
    begin = first_block * step.block_n
    stop = tl.minimum(stop_block * step.block_n, length)
    if cache_layout.tiling is None and cache_layout.scaling is None:
        return attend(state, q, tokens, begin, stop, scale, no_prefetch, _load_rows, cache_layout, step)
    elif step.num_stages > 1:
        return attend(state, q, tokens, begin, stop, scale, _prefetch_scales, _load_codes, cache_layout, step)
    else:
        return attend(state, q, tokens, begin, stop, scale, _prefetch_packed, _load_packed, cache_layout, step)


class PortableSparseDecodeConfig(NamedTuple):
    """Compile-time configuration of the kernel.

    Attributes:
        cache_layout, extra_cache_layout: ``TokenAddress`` of each cache; None without a second one.
        step: ``online_softmax``'s constants.
        split: ``split_kv.work``'s constants.
        q_align: unit of the strides of q, in elements.
    """

    cache_layout: Any
    extra_cache_layout: Any
    step: Any
    split: Any
    q_align: Any


class SelectedKeys(NamedTuple):
    """A cache and the lists of indices into it, at [request · stride_request + token · stride_token]."""

    cache: SparseCache
    indices: Pointer
    stride_request: Int64
    stride_token: Int64


@kernel(same={"outputs_tokens": "key_lengths_tokens", "outputs_rows": "outputs_heads"})
def sparse_decode_kernel(
    query: BatchQuery,
    query_rope: QueryRopeRows,
    own: SelectedKeys,
    extra: SelectedKeys,
    key_lengths: KeyLengths,
    outputs: Outputs,
    grid: SplitGrid,
    scratch,
    softmax_scale: tl.float32,
    CONFIG: tl.constexpr,
):
    """A CTA processes a balanced range, or a work item, for one group of heads.

    A group is ``block_h`` heads. The CTAs of a work item's groups have adjacent indices, so all but the first hit the
    L2 cache.
    """
    # Triton 3.6 passes a named tuple within a constexpr as a plain tuple, unless it is a constexpr itself.
    step: tl.constexpr = CONFIG.step
    SPLIT: tl.constexpr = CONFIG.split
    cache_layout: tl.constexpr = CONFIG.cache_layout
    extra_cache_layout: tl.constexpr = CONFIG.extra_cache_layout
    BLOCK_H: tl.constexpr = step.block_h
    BLOCK_N: tl.constexpr = step.block_n
    group = tl.program_id(0) % grid.num_groups
    rows = GroupRows(group, 0, group * BLOCK_H, tl.arange(0, BLOCK_H))
    head = rows.first + rows.in_group
    in_heads = head < outputs.heads
    scale = softmax_scale * LOG2_E

    work = find_work(tl.program_id(0) // grid.num_groups, grid, key_lengths, scratch, SPLIT)
    cost = work.range.first_cost
    for item in range(work.first, work.stop):
        split = split_of(work, item, cost, grid, key_lengths, scratch, SPLIT)
        cost += split.blocks + SPLIT.overhead
        if split.first < split.stop:
            request, token = device.request_and_token(item, outputs.tokens)
            q_offset = request * query.stride_request + token * query.stride_token + head * query.stride_head
            q_tile = load_query(query.q, q_offset * CONFIG.q_align, query_rope, request, token, head, in_heads, step)
            length = device.key_count(item, key_lengths)
            indices = own.indices + request * own.stride_request + token * own.stride_token
            state = empty_state(step)
            tokens = SelectedSlots(own.cache, indices)
            state = _attend_blocks(state, q_tile, tokens, split.first, split.stop, length, scale, cache_layout, step)
            if extra.indices is not None:
                before = tl.cdiv(length, BLOCK_N)
                first_extra = tl.maximum(split.first - before, 0)
                stop_extra = tl.maximum(split.stop - before, 0)
                indices = extra.indices + request * extra.stride_request + token * extra.stride_token
                length = device.extra_key_count(item, key_lengths)
                tokens = SelectedSlots(extra.cache, indices)
                state = _attend_blocks(
                    state, q_tile, tokens, first_extra, stop_extra, length, scale, extra_cache_layout, step
                )
            values, lse2 = normalize(state, scale, step)
            cols = tl.arange(0, step.latent)
            write_result(outputs, scratch, work, split, rows, cols, values, lse2, grid, SPLIT)
    write_metadata(work, grid, scratch, SPLIT)
