"""Argument groups of both kernels of ``compress``, and the addresses of the paged states."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_row import RowBytes
from flashlatte.kernels.triton.rows import slot_row
from flashlatte.runtime.kernel_records import Constant, ElementPointer, Float32, Int64, Pointer


class Tokens(NamedTuple):
    """A step's tokens, and the scores ``ape`` [ratio, width] that are added by index in the group.

    Strides of rows are in units of their alignment. Records are not nested here: in the loops of these kernels, Triton
    3.6 loses the constants of a nested record.
    """

    kv: Pointer
    kv_stride: Int64
    kv_align: Constant
    score: Pointer
    score_stride: Int64
    score_align: Constant
    ape: Pointer
    ape_stride: Int64
    ape_align: Constant
    request_ids: ElementPointer
    id_stride: Int64
    positions: ElementPointer
    position_stride: Int64
    slot_mapping: ElementPointer
    slot_stride: Int64


class States(NamedTuple):
    """The paged states, the fields of ``CacheRows``, and the pages [requests, columns] of each request's ring."""

    start: Pointer
    page_stride: Int64
    row_stride: Int64
    align: Constant
    num_pages: Int64
    page_size: Int64
    table: ElementPointer
    table_stride: Int64
    requests: Int64
    columns: Int64


class RowTarget(NamedTuple):
    """The row's cache, the fields of ``CacheRows``, and the parameters that turn a group's sum into a row."""

    start: Pointer
    page_stride: Int64
    row_stride: Int64
    align: Constant
    num_slots: Int64
    page_size: Int64
    weight: Pointer
    eps: Float32
    cos_sin: Pointer
    num_positions: Int64


class CompressConstants(NamedTuple):
    """A call's constants, passed as one constexpr argument.

    Attributes:
        head_dim, rope_dim: elements of a row, and of its rotated part.
        ratio: tokens of a group.
        overlaps: whether a row also depends on the preceding group.
        row_bytes: the encoding of a row.
        wide: whether slots exceed 32 bits.
        native: whether the GPU has e4m3 conversion instructions.
    """

    head_dim: int
    rope_dim: int
    ratio: int
    overlaps: bool
    row_bytes: RowBytes
    wide: bool
    native: bool


@triton.jit
def locate_state(states, request, position, wanted):
    """Pointers to the states of positions, and whether each wanted state exists."""
    wanted = wanted & (position < 2**31)
    # 64-bit divisions took longer than loading the row.
    short, page_size = tl.where(wanted, position, 0).to(tl.uint32), states.page_size.to(tl.uint32)
    column = short // page_size
    offset = (short - column * page_size).to(tl.int64)
    entry = states.table + request * states.table_stride + (column % states.columns.to(tl.uint32)).to(tl.int64)
    page = tl.load(entry, mask=wanted, other=-1).to(tl.int64)
    found = wanted & (page >= 0) & (page < states.num_pages)
    # tl.where(found, ...) fails to compile here with Triton 3.6 (layout).
    page = tl.minimum(tl.maximum(page, 0), states.num_pages - 1)
    return slot_row(states, page, offset), found
