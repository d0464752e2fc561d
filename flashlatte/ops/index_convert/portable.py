"""``index_convert`` in Triton: one program per row."""

# Triton's annotations and calls are not Python's.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.block_tables import RowTables, row_tables, slots_in_table, table_of_row
from flashlatte.kernels.triton.dependent_launch import gdc_wait, launch_options, launches_overlap
from flashlatte.kv_cache.sharding import Sharding
from flashlatte.ops.index_convert.reference import IndexConvertParams
from flashlatte.runtime.kernel_records import ElementPointer, Int32, Int64, Pointer
from flashlatte.runtime.strides import first_stride, stride_in_use
from flashlatte.runtime.triton_kernel import kernel

BLOCK, WARPS = 2048, 8


class SelectedPositions(NamedTuple):
    """The positions that each row selects: the first ``sinks``, the last ``window`` up to query_positions [rows], and
    indices [rows, width - sinks - window]."""

    indices: Pointer
    stride: Int64
    query_positions: ElementPointer
    query_stride: Int64
    sinks: Int64
    window: Int64
    width: Int32


class ContextRank(NamedTuple):
    """A ``kv_cache.sharding.Sharding`` in a kernel."""

    rank: Int64
    size: Int64
    interleave: Int64


class RowWorkspaces(NamedTuple):
    """The workspace of each row: ids [rows] below ``count``, and the first slot of each workspace, ``starts``. None: no
    row has one."""

    ids: ElementPointer
    stride: Int64
    starts: ElementPointer
    start_stride: Int64
    count: Int64


class ConvertedSlots(NamedTuple):
    """slots [rows, width], and the number of each row's valid slots; None if it is not returned."""

    slots: Pointer
    stride: Int64
    counts: Pointer


def index_convert(params: IndexConvertParams) -> None:
    indices, block_table, request_ids, slots = params.indices, params.block_table, params.request_ids, params.slots
    query_positions, ids, starts = params.query_positions, params.workspace_ids, params.workspace_starts
    sharding = Sharding(*params.sharding)
    # The number of tokens that fit this rank's table and those of the other ranks.
    reach = (block_table.shape[1] * params.page_size + sharding.interleave) * sharding.size
    overlapped = launches_overlap(slots.device)
    index_convert_kernel[(slots.shape[0],)](
        SelectedPositions(
            indices,
            0 if indices is None else stride_in_use(indices, 0),
            query_positions,
            first_stride(query_positions),
            params.sinks,
            params.window,
            slots.shape[1],
        ),
        row_tables(block_table, params.page_size, request_ids, params.next_n),
        ContextRank(*sharding),
        RowWorkspaces(ids, first_stride(ids), starts, first_stride(starts), 0 if starts is None else starts.shape[0]),
        ConvertedSlots(slots, stride_in_use(slots, 0), params.counts),
        SHARDED=sharding.size > 1,
        COMPACT=params.compact,
        LARGEST=torch.iinfo(slots.dtype).max,
        NARROW=reach < 2**31,
        BLOCK=BLOCK,
        OVERLAPPED=overlapped,
        num_warps=WARPS,
        **launch_options(overlapped),
    )


@kernel
def index_convert_kernel(
    selection: SelectedPositions,
    tables: RowTables,
    ranks: ContextRank,
    workspaces: RowWorkspaces,
    outputs: ConvertedSlots,
    SHARDED: tl.constexpr,
    COMPACT: tl.constexpr,
    LARGEST: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """A program converts a row.

    NARROW: positions beyond 2^31 are outside the table.
    """
    if OVERLAPPED:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    table, in_table = table_of_row(tables, row)
    workspace = tl.full([], -1, tl.int64)
    workspace_start = tl.zeros([], tl.int64)
    if workspaces.ids is not None:
        workspace = tl.load(workspaces.ids + row * workspaces.stride).to(tl.int64)
        known = (workspace >= 0) & (workspace < workspaces.count)
        start = workspaces.starts + workspace * workspaces.start_stride
        workspace_start = tl.load(start, mask=known, other=0).to(tl.int64)

    largest = tl.full([], LARGEST, tl.int64)
    interleave, size, page_size = ranks.interleave, ranks.size, tables.page_size
    if NARROW:
        interleave, size, page_size = interleave.to(tl.int32), size.to(tl.int32), page_size.to(tl.int32)
    count = tl.zeros([], tl.int32)
    slot_row = outputs.slots + row * outputs.stride
    for block in range(0, selection.width, BLOCK):
        column = block + tl.arange(0, BLOCK)
        position = row_positions(selection, row, column)
        exists = position >= 0
        owned = exists
        if NARROW:  # 64-bit divisions are slow, and positions beyond the table need none
            owned = owned & (position < 0x7FFFFFFF)
        local = tl.where(owned, position, 0)
        if NARROW:
            local = local.to(tl.int32)
        if SHARDED:
            owned = owned & ((local // interleave) % size == ranks.rank)
            local = local // (interleave * size) * interleave + local % interleave
        slot, valid = slots_in_table(table, local, owned & in_table, tables.max_pages, page_size, largest)
        if workspaces.ids is not None:
            slot = tl.where(workspace >= 0, workspace_start + position, slot)
            valid = tl.where(workspace >= 0, exists & (workspace < workspaces.count), valid)
        valid = valid & (slot >= 0) & (slot <= largest)
        slot = tl.where(valid, slot, -1).to(outputs.slots.dtype.element_ty)
        if COMPACT:
            positions = tl.cumsum(valid.to(tl.int32), axis=0)
            tl.store(slot_row + count + positions - 1, slot, mask=valid)
        else:
            tl.store(slot_row + column, slot, mask=column < selection.width)
        count += tl.sum(valid.to(tl.int32), axis=0)
    if COMPACT:
        for block in range(count, selection.width, BLOCK):
            column = block + tl.arange(0, BLOCK)
            none = tl.full([BLOCK], -1, outputs.slots.dtype.element_ty)
            tl.store(slot_row + column, none, mask=column < selection.width)
    if outputs.counts is not None:
        tl.store(outputs.counts + row, count)


@triton.jit
def row_positions(selection, row, column):
    """int64: sinks, the window, then the indices that are in neither; -1 for none."""
    position = tl.full(column.shape, -1, tl.int64)
    sinks, window = selection.sinks, selection.window
    pattern = sinks + window
    if selection.indices is not None:
        chosen = (column >= pattern) & (column < selection.width)
        entry = selection.indices + row * selection.stride + (column - pattern)
        position = tl.load(entry, mask=chosen, other=-1).to(tl.int64)
    if selection.query_positions is not None:
        query = tl.load(selection.query_positions + row * selection.query_stride).to(tl.int64)
        twice = (position <= query) & ((position < sinks) | (position > query - window))
        position = tl.where(twice, -1, position)
        recent = query - window + 1 + (column - sinks)
        recent = tl.where((recent >= sinks) & (query >= 0), recent, -1)
        first = tl.where(column <= query, column, -1).to(tl.int64)
        position = tl.where(column < pattern, recent, position)
        position = tl.where(column < sinks, first, position)
        position = tl.where(column < selection.width, position, -1)
    return position
