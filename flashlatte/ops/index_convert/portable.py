"""``index_convert`` in Triton: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.dependent_launch import gdc_wait, launch_options, launches_overlap
from flashlatte.kv_cache.sharding import Sharding
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

BLOCK, WARPS = 2048, 8


def index_convert(
    indices: torch.Tensor | None,
    block_table: torch.Tensor,
    page_size: int,
    request_ids: torch.Tensor | None,
    next_n: int,
    query_positions: torch.Tensor | None,
    sinks: int,
    window: int,
    workspace_ids: torch.Tensor | None,
    workspace_starts: torch.Tensor | None,
    sharding: Sharding,
    compact: bool,
    slots: torch.Tensor,
    counts: torch.Tensor | None,
) -> None:
    requests, max_pages = block_table.shape
    # The number of tokens that fit this rank's table and those of the other ranks.
    reach = (max_pages * page_size + sharding.interleave) * sharding.size
    overlapped = launches_overlap(slots.device)
    index_convert_kernel[(slots.shape[0],)](
        indices=indices,
        block_table=block_table,
        request_ids=request_ids,
        query_positions=query_positions,
        workspace_ids=workspace_ids,
        workspace_starts=workspace_starts,
        slots=slots,
        counts=counts,
        width=slots.shape[1],
        sinks=sinks,
        window=window,
        page_size=page_size,
        next_n=next_n,
        requests=requests,
        max_pages=max_pages,
        workspaces=0 if workspace_starts is None else workspace_starts.shape[0],
        rank=sharding.rank,
        size=sharding.size,
        interleave=sharding.interleave,
        index_stride=0 if indices is None else stride_in_use(indices, 0),
        table_stride=stride_in_use(block_table, 0),
        request_stride=0 if request_ids is None else request_ids.stride(0),
        query_stride=0 if query_positions is None else query_positions.stride(0),
        workspace_stride=0 if workspace_ids is None else workspace_ids.stride(0),
        start_stride=0 if workspace_starts is None else workspace_starts.stride(0),
        slot_stride=stride_in_use(slots, 0),
        SHARDED=sharding.size > 1,
        COMPACT=compact,
        LARGEST=torch.iinfo(slots.dtype).max,
        NARROW=reach < 2**31,
        BLOCK=BLOCK,
        OVERLAPPED=overlapped,
        num_warps=WARPS,
        **launch_options(overlapped),
    )


@kernel(by_element=("request_ids", "query_positions", "workspace_ids", "workspace_starts"))
def index_convert_kernel(
    indices,
    block_table,
    request_ids,
    query_positions,
    workspace_ids,
    workspace_starts,
    slots,
    counts,
    width: tl.int32,
    sinks: tl.int64,
    window: tl.int64,
    page_size: tl.int64,
    next_n: tl.int64,
    requests: tl.int64,
    max_pages: tl.int64,
    workspaces: tl.int64,
    rank: tl.int64,
    size: tl.int64,
    interleave: tl.int64,
    index_stride: tl.int64,
    table_stride: tl.int64,
    request_stride: tl.int64,
    query_stride: tl.int64,
    workspace_stride: tl.int64,
    start_stride: tl.int64,
    slot_stride: tl.int64,
    SHARDED: tl.constexpr,
    COMPACT: tl.constexpr,
    LARGEST: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    if OVERLAPPED:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    request = row // next_n if request_ids is None else tl.load(request_ids + row * request_stride).to(tl.int64)
    in_table = (request >= 0) & (request < requests)
    table = block_table + tl.where(in_table, request, 0) * table_stride
    workspace = tl.full([], -1, tl.int64)
    workspace_start = tl.zeros([], tl.int64)
    if workspace_ids is not None:
        workspace = tl.load(workspace_ids + row * workspace_stride).to(tl.int64)
        known = (workspace >= 0) & (workspace < workspaces)
        workspace_start = tl.load(workspace_starts + workspace * start_stride, mask=known, other=0).to(tl.int64)

    largest = tl.full([], LARGEST, tl.int64)
    if NARROW:
        interleave, size, page_size = interleave.to(tl.int32), size.to(tl.int32), page_size.to(tl.int32)
    count = tl.zeros([], tl.int32)
    slot_row = slots + row * slot_stride
    for block in range(0, width, BLOCK):
        column = block + tl.arange(0, BLOCK)
        position = row_positions(
            indices, query_positions, row, column, width, sinks, window, index_stride, query_stride
        )
        exists = position >= 0
        owned = exists
        if NARROW:  # 64-bit divisions are slow, and positions beyond the table need none
            owned = owned & (position < 0x7FFFFFFF)
        local = tl.where(owned, position, 0)
        if NARROW:
            local = local.to(tl.int32)
        if SHARDED:
            owned = owned & ((local // interleave) % size == rank)
            local = local // (interleave * size) * interleave + local % interleave
        entry = local // page_size
        readable = owned & in_table & (entry < max_pages)
        page = tl.load(table + entry, mask=readable, other=-1).to(tl.int64)
        # A page whose slots would overflow is invalid.
        valid = (page >= 0) & (page <= largest // page_size)
        slot = tl.where(valid, page, 0) * page_size + (local - entry * page_size)
        if workspace_ids is not None:
            slot = tl.where(workspace >= 0, workspace_start + position, slot)
            valid = tl.where(workspace >= 0, exists & (workspace < workspaces), valid)
        valid = valid & (slot >= 0) & (slot <= largest)
        slot = tl.where(valid, slot, -1).to(slots.dtype.element_ty)
        if COMPACT:
            ranks = tl.cumsum(valid.to(tl.int32), axis=0)
            tl.store(slot_row + count + ranks - 1, slot, mask=valid)
        else:
            tl.store(slot_row + column, slot, mask=column < width)
        count += tl.sum(valid.to(tl.int32), axis=0)
    if COMPACT:
        for block in range(count, width, BLOCK):
            column = block + tl.arange(0, BLOCK)
            tl.store(slot_row + column, tl.full([BLOCK], -1, slots.dtype.element_ty), mask=column < width)
    if counts is not None:
        tl.store(counts + row, count)


@triton.jit
def row_positions(indices, query_positions, row, column, width, sinks, window, index_stride, query_stride):
    """int64: sinks, the window, then the indices that are in neither; -1 for none."""
    position = tl.full(column.shape, -1, tl.int64)
    pattern = sinks + window
    if indices is not None:
        chosen = (column >= pattern) & (column < width)
        entry = indices + row * index_stride + (column - pattern)
        position = tl.load(entry, mask=chosen, other=-1).to(tl.int64)
    if query_positions is not None:
        query = tl.load(query_positions + row * query_stride).to(tl.int64)
        twice = (position <= query) & ((position < sinks) | (position > query - window))
        position = tl.where(twice, -1, position)
        recent = query - window + 1 + (column - sinks)
        recent = tl.where((recent >= sinks) & (query >= 0), recent, -1)
        first = tl.where(column <= query, column, -1).to(tl.int64)
        position = tl.where(column < pattern, recent, position)
        position = tl.where(column < sinks, first, position)
        position = tl.where(column < width, position, -1)
    return position
