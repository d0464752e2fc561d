"""Block tables of query rows in kernels: the slots of positions within the request of a row."""

# Triton's annotations and calls are not Python's.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.runtime.kernel_records import ElementPointer, Int32, Int64
from flashlatte.runtime.strides import first_stride, stride_in_use


class RowTables(NamedTuple):
    """block_table [requests, max_pages], and the request of each row: ``request_ids`` [rows], or row // next_n. None:
    there is no table."""

    block_table: ElementPointer
    stride: Int64
    requests: Int64
    max_pages: Int64
    page_size: Int64
    request_ids: ElementPointer
    request_stride: Int64
    next_n: Int32


def row_tables(
    block_table: torch.Tensor | None, page_size: int, request_ids: torch.Tensor | None, next_n: int
) -> RowTables:
    if block_table is None:
        return RowTables(None, 0, 0, 0, 1, None, 0, 1)
    requests, max_pages = block_table.shape
    return RowTables(
        block_table,
        stride_in_use(block_table, 0),
        requests,
        max_pages,
        page_size,
        request_ids,
        first_stride(request_ids),
        next_n if request_ids is None else 1,
    )


@triton.jit
def table_of_row(tables, row):
    """The block table of the request of a row (int64), and whether the request exists."""
    if tables.request_ids is None:
        request = (row.to(tl.int32) // tables.next_n).to(tl.int64)
    else:
        request = tl.load(tables.request_ids + row * tables.request_stride).to(tl.int64)
    exists = (request >= 0) & (request < tables.requests)
    return tables.block_table + tl.where(exists, request, 0) * tables.stride, exists


@triton.jit
def slots_in_table(table, position, readable, max_pages, page_size, largest):
    """int64 slots of positions >= 0 that are ``readable``, and whether they are valid: their pages are in the table and
    not beyond the slot ``largest``."""
    entry = position // page_size
    page = tl.load(table + entry, mask=readable & (entry < max_pages), other=-1).to(tl.int64)
    # A page whose slots would overflow is invalid.
    valid = (page >= 0) & (page <= largest // page_size)
    return tl.where(valid, page, 0) * page_size + (position - entry * page_size), valid
