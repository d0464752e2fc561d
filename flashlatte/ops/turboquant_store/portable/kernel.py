"""The kernel of ``turboquant_store``: tiles of rows, each the key or the value of a token's head.

A tile goes through tensor cores, whichever side it is: keys meet the Hadamard matrix, whose entries are plus and minus
a power of two, and values the identity, so that every product is exact. What that is good for is where numbers come
out: a row is four threads', and the columns of the matrix are in the order in which eight numbers of a thread are
neighbours. So codes are packed, rows are summed and records are written without a word through shared memory.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import Slots, locate_slots
from flashlatte.kernels.triton.fp8 import float_to_e4m3, to_float32
from flashlatte.kernels.triton.turboquant import parity
from flashlatte.kv_cache.turboquant import LARGEST_HALF, NORM_EPSILON, SMALLEST_VALUE_SCALE
from flashlatte.ops.turboquant_store.portable.codes import codes_of, quotient
from flashlatte.ops.turboquant_store.portable.records import column_dims, eights, pack, store, store_bytes, store_codes
from flashlatte.runtime.triton_kernel import kernel

_NORM_EPSILON, _SMALLEST_VALUE_SCALE = tl.constexpr(NORM_EPSILON), tl.constexpr(SMALLEST_VALUE_SCALE)
_LARGEST_HALF = tl.constexpr(LARGEST_HALF)


class StoreForm(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        head_dim, key_bits, value_bits, norm_offset, value_offset, scale_offset: of the format.
        midpoints: those above 0, for N(0, 1).
        entry: the Hadamard matrix's, so small that squares are no larger than a key's.
        inverse_entry, length_factor: 1 / entry, and what squares of rotated rows are short of.
        align: numbers of which strides of rows are multiples.
        cache_align: bytes of which strides of the cache are multiples: 8, 4, 2 or 1.
        wide: slots may pass 2^31.
        native: the GPU has e4m3 conversion instructions.
        in_order: rows are float32, which only keys go through a product for, and its columns are in order.
        shifted: values begin in the middle of a word, with dim 4, and the four dims before are the last.
        ptx: records are stored by PTX.
        interpreted: the kernel runs in Triton's interpreter, with float32 operands.
        block: rows of a tile.
    """

    head_dim: int
    key_bits: int
    value_bits: int
    norm_offset: int
    value_offset: int
    scale_offset: int
    midpoints: tuple[float, ...]
    entry: float
    inverse_entry: float
    length_factor: float
    align: int
    cache_align: int
    wide: bool
    native: bool
    in_order: bool
    shifted: bool
    ptx: bool
    interpreted: bool
    block: int


class StoreRows(NamedTuple):
    """Keys or values, and the strides of their tokens and heads."""

    first: Any
    token_stride: Any
    head_stride: Any


class StoreCache(NamedTuple):
    """A cache, and the strides of its pages, slots and heads."""

    first: Any
    page_stride: Any
    slot_stride: Any
    head_stride: Any


class StoreTiles(NamedTuple):
    """How many tiles there are; each has so many heads, of which all are so many groups."""

    count: Any
    heads: Any
    groups: Any


@triton.jit
def _half(x, is_finite):
    """Bits int32 of fp16 of float32 x [BLOCK_R], saturating; NaN where the row is not finite."""
    x = tl.minimum(tl.maximum(x, -_LARGEST_HALF), _LARGEST_HALF)
    return tl.where(is_finite, x, float("nan")).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)


@triton.jit
def _row_sum(x):
    """[BLOCK_R] of x [BLOCK_R, D / 8, 8]: first those that a thread has."""
    return tl.sum(tl.sum(x, axis=2), axis=1)


@triton.jit
def _is_finite(rows):
    """Whether all numbers of each row are: x · 0 is 0, or NaN."""
    return _row_sum(rows * 0.0) == 0


@triton.jit
def _store_keys(record, x, valid, form: tl.constexpr):
    """Rows x [BLOCK_R, D / 8, 8], rotated keys times ``form.entry``."""
    # A rotation keeps lengths.
    norm = tl.sqrt_rn(_row_sum(x * x) * form.length_factor)
    # Rotated by a matrix of 1 and -1 the direction of a key has variance 1 in each place.
    direction = x * tl.div_rn(form.inverse_entry, norm + _NORM_EPSILON)[:, None, None]
    MIDPOINTS: tl.constexpr = form.midpoints
    codes = codes_of(direction, MIDPOINTS)
    store_codes(record, codes, valid, form.key_bits, form.cache_align, form.ptx)
    half = _half(norm, norm - norm == 0)
    store_bytes(record + form.norm_offset, half, valid, 2, min(form.cache_align, 2), form.ptx)


@triton.jit
def _store_values(record, x, valid, form: tl.constexpr):
    """Rows x [BLOCK_R, D / 8, 8] of values, which begin with dim 4 if ``form.shifted`` and end with the four before."""
    LARGEST: tl.constexpr = (1 << form.value_bits) - 1
    HALF_ALIGN: tl.constexpr = min(form.cache_align, 2)
    minimum, maximum = tl.min(tl.min(x, axis=2), axis=1), tl.max(tl.max(x, axis=2), axis=1)
    # Of a row that is not finite a product is NaN all over, but for an infinity in its place.
    is_finite = _is_finite(x) if form.in_order else maximum * 0.0 + minimum * 0.0 == 0
    scale = tl.maximum(tl.div_rn(maximum - minimum, LARGEST * 1.0), _SMALLEST_VALUE_SCALE)
    # No larger than LARGEST, but in a row that is not finite, which may have any codes.
    steps = (quotient(x - minimum[:, None, None], scale[:, None, None], form.interpreted) + 0.5).to(tl.int32)
    scale_half = _half(scale, is_finite)
    if form.shifted:
        words = pack(steps, 4)
        place = tl.arange(0, form.head_dim // 8)[None, :]
        is_last = place == form.head_dim // 8 - 1
        address = record[:, None] + (form.value_offset + 2) + place * 4
        store(address, words, valid[:, None] & (place != form.head_dim // 8 - 1), 4, form.ptx)
        last = tl.sum(tl.where(is_last, words, 0), axis=1)
        store(record + form.value_offset, last >> 16, valid, 2, form.ptx)
        store(record + form.scale_offset - 2, (last & 0xFFFF) | (scale_half << 16), valid, 4, form.ptx)
    else:
        ALIGN: tl.constexpr = form.cache_align if form.value_offset % 4 == 0 else HALF_ALIGN
        store_codes(record + form.value_offset, steps, valid, form.value_bits, ALIGN, form.ptx)
        store_bytes(record + form.scale_offset, scale_half, valid, 2, HALF_ALIGN, form.ptx)
    store_bytes(record + form.scale_offset + 2, _half(minimum, is_finite), valid, 2, HALF_ALIGN, form.ptx)


@triton.jit
def _matrix(dtype: tl.constexpr, VALUES: tl.constexpr, form: tl.constexpr):
    """What rows of values, or of keys, are multiplied by: [D, D]."""
    BITS: tl.constexpr = form.value_bits if VALUES else form.key_bits
    dims = tl.arange(0, form.head_dim)
    columns = dims
    if not form.in_order:
        columns = column_dims(form.head_dim, 4 if VALUES and form.shifted else 0, BITS == 3)
    if VALUES:
        matrix = tl.where(dims[:, None] == columns[None, :], 1.0, 0.0)
    else:
        matrix = tl.where(parity(dims[:, None] & columns[None, :]) == 0, form.entry, -form.entry)
    return matrix.to(dtype)


@triton.jit
def _store_tiles(rows, cache, slots, tiles, VALUES: tl.constexpr, form: tl.constexpr):
    """Store a program's tiles, of values or of keys."""
    tokens = form.block // tiles.heads
    IS_ROTATED: tl.constexpr = not VALUES and form.key_bits < 8
    matrix = _matrix(tl.float32 if form.interpreted else rows.first.dtype.element_ty, VALUES, form)
    dims = tl.arange(0, form.head_dim)
    row = tl.arange(0, form.block)
    row_token, row_head = (row // tiles.heads).to(tl.int64), (row % tiles.heads).to(tl.int64)
    row_offset = (row_token * rows.token_stride + row_head * rows.head_stride) * form.align
    # Four programs of an SM wait for each other's loads; a stage ahead would leave room for two.
    for tile in tl.range(tl.program_id(0), tiles.count, tl.num_programs(0), num_stages=1):
        first_token = (tile // tiles.groups).to(tl.int64) * tokens
        first_head = (tile % tiles.groups).to(tl.int64) * tiles.heads
        token = first_token + row_token
        first_row = rows.first + (first_token * rows.token_stride + first_head * rows.head_stride) * form.align
        # [BLOCK_R, D]
        x = tl.load(
            first_row + row_offset[:, None] + dims[None, :], mask=(token < slots.num_tokens)[:, None], other=0.0
        )
        valid, page, offset = locate_slots(slots, token, form.wide)
        in_page = offset * cache.slot_stride + (first_head + row_head) * cache.head_stride
        record = cache.first + (page * cache.page_stride + in_page) * form.cache_align
        if form.interpreted:
            x = to_float32(x, form.interpreted)
        if not VALUES and form.key_bits == 8:
            codes = float_to_e4m3(x.to(tl.float32), form.native)
            tl.store(record[:, None] + dims[None, :], codes, mask=valid[:, None])
        else:
            if IS_ROTATED or not form.in_order:
                x = tl.dot(x, matrix, input_precision="ieee")
            x = eights(x, (form.value_bits if VALUES else form.key_bits) == 3, form.in_order)
            if VALUES:
                _store_values(record, x, valid, form)
            else:
                _store_keys(record, x, valid, form)


@kernel(by_element=("slot_mapping",))
def turboquant_store_kernel(
    key,
    k_token_stride: tl.int64,
    k_head_stride: tl.int64,
    value,
    v_token_stride: tl.int64,
    v_head_stride: tl.int64,
    cache,
    page_stride: tl.int64,
    slot_stride: tl.int64,
    cache_head_stride: tl.int64,
    slot_mapping,
    mapping_stride: tl.int64,
    num_tokens: tl.int64,
    num_slots: tl.int64,
    page_size: tl.int64,
    num_tiles: tl.int32,
    tile_heads: tl.int32,
    head_groups: tl.int32,
    FORM: tl.constexpr,
):
    """Strides count ``FORM.align`` numbers, those of the cache ``FORM.cache_align`` bytes."""
    records = StoreCache(cache, page_stride, slot_stride, cache_head_stride)
    slots = Slots(slot_mapping, mapping_stride, num_tokens, num_slots, page_size)
    tiles = StoreTiles(num_tiles, tile_heads, head_groups)
    if tl.program_id(1) == 1:
        _store_tiles(StoreRows(value, v_token_stride, v_head_stride), records, slots, tiles, True, FORM)
    else:
        _store_tiles(StoreRows(key, k_token_stride, k_head_stride), records, slots, tiles, False, FORM)
