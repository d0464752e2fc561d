"""Stores of all kernels of ``topk``: the selected columns of a row, or their slots, and their values."""

# Triton's annotations and calls are not Python's.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.block_tables import RowTables, row_tables, slots_in_table, table_of_row
from flashlatte.kernels.triton.fp8 import to_float32
from flashlatte.ops.topk.order import load_values, ordered
from flashlatte.ops.topk.reference import TopkParams
from flashlatte.runtime.kernel_records import ElementPointer, Int32, Int64
from flashlatte.runtime.strides import stride_in_use

LARGEST_SLOT = tl.constexpr(2**31 - 1)


class TopkOutputs(NamedTuple):
    """indices [rows, k], and values [rows, k] or None. Triton's tuples have another attribute ``values``."""

    indices: ElementPointer
    index_stride: Int64
    top_values: ElementPointer
    value_stride: Int64
    k: Int32


class RowTable(NamedTuple):
    """The block table of a row's request, and its number of pages: 0 if the request does not exist."""

    pages: Any
    max_pages: Any
    page_size: Any


class RowResults(NamedTuple):
    """The outputs of a row: ``indices`` are slots of the ``RowTable``, or columns if it is None.

    Kernels make it in their bodies, because Triton 3.6 functions cannot return None in a tuple.
    """

    indices: Any
    top_values: Any
    table: Any


def outputs_of(params: TopkParams) -> tuple[TopkOutputs, RowTables]:
    indices, values = params.indices, params.values
    value_stride = 0 if values is None else stride_in_use(values, 0)
    outputs = TopkOutputs(indices, stride_in_use(indices, 0), values, value_stride, indices.shape[1])
    return outputs, row_tables(params.block_table, params.page_size, params.request_ids, params.next_n)


@triton.jit
def row_table_of(tables, row):
    """The ``RowTable`` of a row (int64)."""
    pages, exists = table_of_row(tables, row)
    return RowTable(pages, tl.where(exists, tables.max_pages, 0).to(tl.int32), tables.page_size.to(tl.int32))


@triton.jit
def results_of_columns(results, columns, chosen):
    """The int32 result for each chosen column of a row."""
    if results.table is None:
        return columns
    else:
        largest = tl.full([], LARGEST_SLOT, tl.int32)
        position = tl.where(chosen, columns, 0)
        table = results.table
        slot, valid = slots_in_table(table.pages, position, chosen, table.max_pages, table.page_size, largest)
        return tl.where(valid & (slot <= LARGEST_SLOT), slot, -1).to(tl.int32)


@triton.jit
def store_all(entries, results, length, k, CAPACITY: tl.constexpr, BLOCK: tl.constexpr):
    """Write all ``length`` <= k <= CAPACITY entries, followed by padding."""
    if results.table is None:
        _store_all(entries, results, tl.arange(0, CAPACITY), length, k)
    else:  # slots take more registers
        for begin in range(0, k, BLOCK):
            _store_all(entries, results, begin + tl.arange(0, BLOCK), length, k)


@triton.jit
def _store_all(entries, results, position, length, k):
    inside = position < length
    index = tl.where(inside, results_of_columns(results, position, inside), -1)
    tl.store(results.indices + position, index, mask=position < k)
    if results.top_values is not None:
        value = to_float32(tl.load(entries + position, mask=inside, other=0.0))
        tl.store(results.top_values + position, tl.where(inside, value, float("-inf")), mask=position < k)


@triton.jit
def store_chosen(entries, results, chosen, position, columns):
    index = results_of_columns(results, columns.to(tl.int32), chosen)
    tl.store(results.indices + position, index, mask=chosen)
    if results.top_values is not None:
        value = to_float32(tl.load(entries + columns, mask=chosen, other=0.0))
        tl.store(results.top_values + position, value, mask=chosen)


@triton.jit
def store_reaching(entries, results, length, kth_key, ties, BLOCK: tl.constexpr):
    """Store the entries of a row whose keys are above ``kth_key``, and the first ``ties`` of those that equal it."""
    above_before = tl.zeros([], tl.int32)
    ties_before = tl.zeros([], tl.int32)
    for block in range(0, length, BLOCK):
        column = block + tl.arange(0, BLOCK)
        valid = column < length
        keys = ordered(load_values(entries + column, valid), valid)
        above = (valid & (keys > kth_key)).to(tl.int32)
        tied = (valid & (keys == kth_key)).to(tl.int32)
        above_inclusive = above_before + tl.cumsum(above, axis=0)
        ties_inclusive = ties_before + tl.cumsum(tied, axis=0)
        selected = (above == 1) | ((tied == 1) & (ties_inclusive <= ties))
        position = above_inclusive - above + tl.minimum(ties_inclusive - tied, ties)
        store_chosen(entries, results, selected, position, column)
        above_before = tl.max(above_inclusive, axis=0)
        ties_before = tl.max(ties_inclusive, axis=0)
