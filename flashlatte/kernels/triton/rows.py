"""Records of kernels: rows of tensors and of paged caches, block tables and windows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import row_alignment
from flashlatte.runtime import query_parts
from flashlatte.runtime.kernel_records import Constant, ElementPointer, Int32, Int64, OptionalInt32, Pointer
from flashlatte.runtime.strides import row_align, stride_in_use, strides_in_use


class TokenRows(NamedTuple):
    """Rows of tokens [T, width].

    ``stride`` is in units of ``align`` elements (bytes, if a kernel copies bytes): the compiler then vectorizes loads
    for any stride.
    """

    start: Pointer
    stride: Int64
    align: Constant


class HeadRows(NamedTuple):
    """Rows of heads [T, H, width]. Strides are in units of ``align`` elements."""

    start: Pointer
    token_stride: Int64
    head_stride: Int64
    align: Constant


class BatchQuery(NamedTuple):
    """q [b, s_q, h_q, d]. The kernel defines the unit of the strides, in elements."""

    q: Pointer
    stride_request: Int64
    stride_token: Int64
    stride_head: Int64


class QueryRopeRows(NamedTuple):
    """The rotated part of queries in a tensor of its own, with strides in units of ``align`` elements. Without
    such a tensor, start and strides are None."""

    start: Pointer
    stride_request: OptionalInt32
    stride_token: OptionalInt32
    stride_head: OptionalInt32
    align: Constant


class CacheRows(NamedTuple):
    """Rows of a paged cache [pages, page_size, width]. Strides are in units of ``align`` elements; ``row_stride`` is 0
    if the format determines it."""

    start: Pointer
    page_stride: Int64
    row_stride: Int64
    align: Constant


class BlockTable(NamedTuple):
    """The pages of requests: ``pages`` at [request · stride], with page ids below ``num_pages``."""

    pages: ElementPointer
    stride: Int64
    num_pages: Int32


class Window(NamedTuple):
    """Number of keys before and after its own position that are visible to a query."""

    left: Int32
    right: Int32


def token_rows(x: torch.Tensor | None, align: int | None = None) -> TokenRows:
    """The rows of x [T, width], or of nothing. ``align`` defaults to their alignment."""
    if x is None:
        return TokenRows(None, 0, 1)
    align = align or row_alignment(x, 0)
    return TokenRows(x, stride_in_use(x, 0) // align, align)


def head_rows(x: torch.Tensor | None, align: int | None = None) -> HeadRows:
    """The rows of x [T, H, width], or elements [T, H], or of nothing. ``align`` defaults to their alignment."""
    if x is None:
        return HeadRows(None, 0, 0, 1)
    align = align or row_alignment(x, 0, 1)
    return HeadRows(x, stride_in_use(x, 0) // align, stride_in_use(x, 1) // align, align)


def query_and_rope(
    q: torch.Tensor, q_rope: torch.Tensor | None, latent: int, rope_tile: int
) -> tuple[torch.Tensor, QueryRopeRows]:
    """The queries [b, s_q, h_q, d] or [s_q, h_q, d], and the record of their rotated part.

    That part is joined to ``q`` if a kernel cannot load it by itself.

    Args:
        latent: width of the latent part in a kernel's tiles.
        rope_tile: width of the tiles of the rotated part; 0 without one.
    """
    if q_rope is not None:
        align = row_align(q_rope)
        request, token, head = (0, *(stride // align for stride in strides_in_use(q_rope)))[-3:]
        if q.shape[-1] == latent and rope_tile > 0 and max(request, token, head) < 2**31:
            return q, QueryRopeRows(q_rope, request, token, head, align)
    return query_parts.join(q, q_rope), QueryRopeRows(None, None, None, None, 1)


def cache_rows(cache: torch.Tensor | None, *, strided: bool, align: int | None = None) -> CacheRows:
    """The rows of a cache, or of nothing.

    Args:
        strided: the cache determines the stride of rows, not the format.
        align: defaults to the alignment of rows.
    """
    if cache is None:
        return CacheRows(None, 0, 0, 1)
    axes = (0, 1) if strided else (0,)
    align = align or row_alignment(cache, *axes)
    page_stride, row_stride, *_ = *(stride_in_use(cache, axis) // align for axis in axes), 0
    return CacheRows(cache, page_stride, row_stride, align)


@triton.jit
def token_row(x, token):
    """Pointers to the rows of tokens."""
    return x.start + token.to(tl.int64) * x.stride * x.align


@triton.jit
def head_row(x, token, head):
    """Pointers to the rows of heads."""
    return x.start + (token.to(tl.int64) * x.token_stride + head.to(tl.int64) * x.head_stride) * x.align


@triton.jit
def slot_row(x, page, offset):
    """Pointers to the rows of slots, if the cache determines their stride."""
    return x.start + (page * x.page_stride + offset * x.row_stride) * x.align


@triton.jit
def page_pointers(x, page):
    """Pointers to pages."""
    return x.start + page * x.page_stride * x.align
