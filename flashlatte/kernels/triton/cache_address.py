"""Addresses of tokens in a paged cache, in Triton."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.runtime.kernel_records import ElementPointer, Int64
from flashlatte.runtime.strides import first_stride, stride_in_use


class Slots(NamedTuple):
    """The slots of new tokens: entry i of ``mapping`` is the slot of token i."""

    mapping: ElementPointer
    stride: Int64
    num_tokens: Int64
    num_slots: Int64
    page_size: Int64


class PageLists(NamedTuple):
    """The requests of new tokens, and their pages: request r has entries indptr[r] to indptr[r + 1] - 1 of ``indices``.

    Entry i of ``request_ids`` is the request of token i.
    """

    request_ids: ElementPointer
    id_stride: Int64
    indptr: ElementPointer
    indptr_stride: Int64
    num_requests: Int64
    indices: ElementPointer
    indices_stride: Int64
    num_indices: Int64
    num_pages: Int64


class Requests(NamedTuple):
    """Packed requests: request i has rows cu_seqlens[i] to cu_seqlens[i + 1], or to the end.

    Attributes:
        num_boundaries: entries of ``cu_seqlens``: num_requests + 1, or num_requests.
        seq_starts: position of each request's first row; None: 0.
        seq_ends: end of each request's positions (exclusive); None: all rows are used.
    """

    cu_seqlens: ElementPointer
    cu_stride: Int64
    num_boundaries: Int64
    num_requests: Int64
    seq_starts: ElementPointer = None
    start_stride: Int64 = 0
    seq_ends: ElementPointer = None
    end_stride: Int64 = 0


class RequestPages(NamedTuple):
    """The pages of requests: ``block_table`` [requests, max_pages], with page ids below ``num_pages``."""

    block_table: ElementPointer
    table_stride: Int64
    max_pages: Int64
    num_pages: Int64
    page_size: Int64


def requests_of(
    cu_seqlens: torch.Tensor,
    num_requests: int,
    seq_starts: torch.Tensor | None,
    seq_ends: torch.Tensor | None = None,
) -> Requests:
    """Make ``Requests`` from tensors."""
    return Requests(
        cu_seqlens,
        cu_seqlens.stride(0),
        cu_seqlens.shape[0],
        num_requests,
        seq_starts,
        first_stride(seq_starts),
        seq_ends,
        first_stride(seq_ends),
    )


def pages_of(block_table: torch.Tensor, num_pages: int, page_size: int) -> RequestPages:
    """Make ``RequestPages`` from tensors."""
    return RequestPages(block_table, stride_in_use(block_table, 0), block_table.shape[1], num_pages, page_size)


def slots_of(slot_mapping: torch.Tensor, cache: torch.Tensor) -> Slots:
    """Make ``Slots`` from slot_mapping [n] and a cache [pages, page_size, …]."""
    num_pages, page_size = cache.shape[:2]
    return Slots(slot_mapping, slot_mapping.stride(0), slot_mapping.shape[0], num_pages * page_size, page_size)


@triton.jit
def page_and_offset(position, valid, page_size, WIDE: tl.constexpr):
    """position // page_size and the remainder, int64; both 0 where not valid.

    WIDE: positions may exceed 2^31, which costs a 64-bit division.
    """
    position = tl.where(valid, position, 0)
    if not WIDE:
        position = position.to(tl.int32)
        page_size = page_size.to(tl.int32)
    page = position // page_size
    offset = position - page * page_size
    return page.to(tl.int64), offset.to(tl.int64)


@triton.jit
def locate_slots(slots, tokens, WIDE: tl.constexpr):
    """For each token: whether its slot is in the cache, and the page and offset of the slot."""
    slot = tl.load(slots.mapping + tokens * slots.stride, mask=tokens < slots.num_tokens, other=-1).to(tl.int64)
    valid = (slot >= 0) & (slot < slots.num_slots)
    page, offset = page_and_offset(slot, valid, slots.page_size, WIDE)
    return valid, page, offset


@triton.jit
def locate_positions(positions, lists, tokens, WIDE: tl.constexpr):
    """``locate_slots`` for ``Slots`` whose mapping has positions in requests."""
    in_use = tokens < positions.num_tokens
    position = tl.load(positions.mapping + tokens * positions.stride, mask=in_use, other=-1).to(tl.int64)
    request = tl.load(lists.request_ids + tokens * lists.id_stride, mask=in_use, other=-1).to(tl.int64)
    valid = (position >= 0) & (request >= 0) & (request < lists.num_requests)
    boundary = lists.indptr + tl.where(valid, request, 0) * lists.indptr_stride
    first = tl.load(boundary, mask=valid, other=0).to(tl.int64)
    end = tl.load(boundary + lists.indptr_stride, mask=valid, other=0).to(tl.int64)
    column, offset = page_and_offset(position, valid, positions.page_size, WIDE)
    entry = first + column
    valid = valid & (entry >= 0) & (entry < end) & (entry < lists.num_indices)
    page = tl.load(lists.indices + entry * lists.indices_stride, mask=valid, other=-1).to(tl.int64)
    valid = valid & (page >= 0) & (page < lists.num_pages)
    return valid, tl.where(valid, page, 0), offset


@triton.jit
def tile_scale_row(page_start, page_size, offset, TILING: tl.constexpr):
    """Pointers to the scales of tokens, if they are bytes after the tokens of a page."""
    return page_start + page_size * TILING.row_bytes + offset * TILING.padded_tiles


@triton.jit
def block_scale_byte(block, SCALING: tl.constexpr):
    """The byte of the scale of a block, from ``scale_offset`` on."""
    return SCALING.blocks // SCALING.scale_lanes * (block % SCALING.scale_lanes) + block // SCALING.scale_lanes


@triton.jit
def locate_rows(requests, pages, rows, num_rows, WIDE: tl.constexpr):
    """For each row: whether it belongs to a request, whether its token is in the cache, and its page and offset."""
    request, start = request_of_row(requests, rows)
    inside = (request >= 0) & (rows < num_rows)
    request = tl.where(inside, request, 0).to(tl.int64)
    position = rows - start
    if requests.seq_starts is not None:
        first = tl.load(requests.seq_starts + request * requests.start_stride, mask=inside, other=0)
        position += first.to(tl.int64)
    if requests.seq_ends is not None:
        end = tl.load(requests.seq_ends + request * requests.end_stride, mask=inside, other=0).to(tl.int64)
        inside = inside & (position < end)
    in_table = inside & (position >= 0) & (position < pages.max_pages * pages.page_size)
    column, offset = page_and_offset(position, in_table, pages.page_size, WIDE)
    entry = pages.block_table + request * pages.table_stride + column
    page = tl.load(entry, mask=in_table, other=-1).to(tl.int64)
    found = in_table & (page >= 0) & (page < pages.num_pages)
    return inside, found, tl.where(found, page, 0), offset


@triton.jit
def end_of_rows(requests, num_rows):
    """The end of the last request's rows."""
    closed = requests.num_boundaries > requests.num_requests
    end = tl.load(requests.cu_seqlens + requests.num_requests * requests.cu_stride, mask=closed, other=0).to(tl.int64)
    return tl.where(closed, end, num_rows)


@triton.jit
def request_of_row(requests, rows):
    """The request i with cu_seqlens[i] <= row < cu_seqlens[i + 1], or -1, and its cu_seqlens[i]."""
    request = tl.full(rows.shape, -1, tl.int64)
    start = tl.zeros(rows.shape, tl.int64)
    span = requests.num_boundaries
    # Binary search for the last boundary <= row.
    while span > 0:
        step = (span + 1) // 2
        candidate = request + step
        exists = candidate < requests.num_boundaries
        value = tl.load(requests.cu_seqlens + candidate * requests.cu_stride, mask=exists, other=0).to(tl.int64)
        reached = exists & (value <= rows)
        request = tl.where(reached, candidate, request)
        start = tl.where(reached, value, start)
        span -= step
    return tl.where(request < requests.num_requests, request, -1), start


@triton.jit
def store_words(rows, index, words, mask, ALIGN: tl.constexpr):
    """Store 16- or 32-bit integers as words ``index`` from the byte addresses ``rows``, multiples of ALIGN."""
    SIZE: tl.constexpr = words.dtype.primitive_bitwidth // 8
    if ALIGN >= SIZE:
        tl.store(rows.to(tl.pointer_type(words.dtype)) + index, words, mask=mask)
    else:
        for byte in tl.static_range(SIZE):
            tl.store(rows + index * SIZE + byte, (words >> (8 * byte)).to(tl.uint8), mask=mask)


@triton.jit
def load_words(rows, index, dtype: tl.constexpr, mask, ALIGN: tl.constexpr):
    """The inverse of ``store_words``: unsigned integers of ``dtype``, 0 where masked."""
    SIZE: tl.constexpr = dtype.primitive_bitwidth // 8
    if ALIGN >= SIZE:
        return tl.load(rows.to(tl.pointer_type(dtype)) + index, mask=mask, other=0)
    else:
        words = tl.load(rows + index * SIZE, mask=mask, other=0).to(dtype)
        for byte in tl.static_range(1, SIZE):
            words |= tl.load(rows + index * SIZE + byte, mask=mask, other=0).to(dtype) << (8 * byte)
        return words
