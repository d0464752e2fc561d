"""Loading of tiles of keys and values, from pages or from new tokens."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import e4m3_to_float, to_float32
from flashlatte.kernels.triton.online_softmax import load_rows
from flashlatte.kernels.triton.rows import HeadRows
from flashlatte.runtime.kernel_records import Float32, Int64, Pointer
from flashlatte.runtime.triton_kernel import INTERPRETED

# The storage dtype of a cache's elements.
PLAIN, E4M3, E5M2, INT8 = 0, 1, 2, 3


class KeyForm(NamedTuple):
    """The constants of loads of keys or values.

    Attributes:
        kind: PLAIN or a quantized kind.
        align: the unit of strides, in elements.
        piece: contiguous elements of a row; ``element_stride`` is the stride of elements, None if known at run time
            only.
        native: whether the GPU has e4m3 conversion instructions.
        ptx: whether the kernel may use inline PTX.
        opaque: whether the PTX is marked as having side effects. Not on Blackwell, where Triton predicates parts of a
            loop and cannot predicate side effects.
    """

    kind: int
    align: int
    piece: int
    element_stride: int | None
    native: bool
    ptx: bool
    opaque: bool


class RowCache(NamedTuple):
    """Keys or values in a cache [pages, page_size, h_kv, pieces, elements].

    Strides of pages, tokens and heads are in units of KeyForm.align elements.
    """

    start: Pointer
    stride_page: Int64
    stride_token: Int64
    stride_head: Int64
    stride_piece: Int64
    stride_element: Int64


class RowScales(NamedTuple):
    """Scales of rows: float32 [pages, page_size, h_kv], or None; then ``value`` applies to all rows.

    Without ``PagedStep.scaled_keys`` a scale applies to all rows of a head.
    """

    scales: Pointer
    stride_page: Int64
    stride_token: Int64
    stride_head: Int64
    value: Float32


class PagedRows(NamedTuple):
    """Keys or values: in pages, and of new tokens [tokens, h_kv, d]."""

    cache: RowCache
    new: HeadRows
    scales: RowScales


class KeyAddresses(NamedTuple):
    """The addresses of the keys of a step.

    Attributes:
        page: [keys] or a scalar: the page of keys in the cache.
        first, offset: a scalar and [keys], whose sum is the offset in the page.
        in_cache: [keys], the mask of keys that are read from the cache.
        token: [keys], the token of new keys in k and v.
        is_new: [keys], the mask of new keys.
    """

    page: Any
    first: Any
    offset: Any
    in_cache: Any
    token: Any
    is_new: Any


@triton.jit
def cache_of_heads(cache, heads, form: tl.constexpr):
    """``cache`` with pointers to the rows of key heads."""
    return RowCache(
        cache.start + heads * cache.stride_head * form.align,
        cache.stride_page,
        cache.stride_token,
        cache.stride_head,
        cache.stride_piece,
        cache.stride_element,
    )


@triton.jit
def load_operand(
    rows,
    addresses,
    dtype: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    form: tl.constexpr,
):
    """Columns FIRST to FIRST + COUNT of rows, [keys, WIDTH] in ``dtype``, without scales; 0 where there is no key."""
    cache = rows.cache
    col = FIRST + tl.arange(0, WIDTH)
    first = addresses.page.to(tl.int64) * cache.stride_page + addresses.first * cache.stride_token
    block = cache.start + first * form.align
    offsets = addresses.offset * cache.stride_token * form.align
    mask = addresses.in_cache[:, None]
    if COUNT != WIDTH:
        mask = mask & (col < FIRST + COUNT)[None, :]
    element_stride = cache.stride_element if form.element_stride is None else form.element_stride
    cols = (col % form.piece) * element_stride
    pointers = (block + offsets)[:, None]
    if form.piece < FIRST + COUNT:
        cols = cols + (col // form.piece) * cache.stride_piece
    x = tl.load(pointers + cols[None, :], mask=mask, other=0)
    x = _converted(x, dtype, form)
    new = rows.new
    if new.start is not None:
        token = addresses.token * new.token_stride
        new_x = load_rows(new.start, token, addresses.is_new, FIRST, COUNT, WIDTH)
        x = tl.where(addresses.is_new[:, None], new_x, x)
    return x


# Converts four one-byte elements to fp16: e5m2 is its upper half; int8 + 128 becomes the lowest bits of 1024.
_E5M2_TO_HALVES = tl.constexpr("prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;")
_INT8_TO_HALVES = tl.constexpr(
    "{ .reg .b32 x; xor.b32 x, $2, 0x80808080; prmt.b32 $0, x, 0x64, 0x4140; prmt.b32 $1, x, 0x64, 0x4342; "
    "mov.b32 x, 0x64806480; sub.f16x2 $0, $0, x; sub.f16x2 $1, $1, x; }"
)


@triton.jit
def _converted(x, dtype: tl.constexpr, form: tl.constexpr):
    """Cast cache elements to an operand, exactly: ``dtype``, or float32 in the interpreter."""
    if form.kind == 0:
        return to_float32(x) if INTERPRETED else x
    elif form.kind > 1 and form.ptx and dtype == tl.float16:
        CODE: tl.constexpr = _E5M2_TO_HALVES if form.kind == 2 else _INT8_TO_HALVES
        return tl.inline_asm_elementwise(CODE, "=&r,=&r,r", [x], dtype=tl.float16, is_pure=not form.opaque, pack=4)
    else:
        if form.kind == 1:
            if form.native and dtype == tl.float16:
                # One instruction for two elements; bf16 needs four.
                x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
            else:
                x = e4m3_to_float(x, form.native)
        elif form.kind == 2:
            # e5m2 is the upper half of fp16.
            x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            x = x.to(tl.float32)
        if not INTERPRETED:
            x = x.to(dtype)
        if form.ptx:
            # An opaque move, as in dense decode: without it, Triton converts in the layout of the MMA.
            x = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=not form.opaque, pack=2
            )
        return x
