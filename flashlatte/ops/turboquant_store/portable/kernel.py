"""The kernel of ``turboquant_store``: tiles of rows, each the key or the value of a token's head.

All tiles pass through tensor cores: keys are multiplied by the Hadamard matrix, whose entries are ± a power of two, and
values by the identity, so every product is exact. The purpose is the layout of the result: a row is in four threads,
and the matrix's columns are ordered so that eight elements of a thread are adjacent. Codes are then packed, rows summed
and records written without shared memory.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import Slots, locate_slots
from flashlatte.kernels.triton.fp8 import float_to_e4m3, to_float32
from flashlatte.kernels.triton.rows import HeadRows
from flashlatte.kernels.triton.turboquant import RecordCache, parity
from flashlatte.kv_cache.turboquant import LARGEST_HALF, NORM_EPSILON, SMALLEST_VALUE_SCALE
from flashlatte.ops.turboquant_store.portable.codes import codes_of, quotient
from flashlatte.ops.turboquant_store.portable.records import column_dims, eights, pack, store, store_bytes, store_codes
from flashlatte.runtime.kernel_records import Int32
from flashlatte.runtime.triton_kernel import INTERPRETED, kernel

_NORM_EPSILON, _SMALLEST_VALUE_SCALE = tl.constexpr(NORM_EPSILON), tl.constexpr(SMALLEST_VALUE_SCALE)
_LARGEST_HALF = tl.constexpr(LARGEST_HALF)


class StoreStep(NamedTuple):
    """The constants of the kernel, in addition to those of records.

    Attributes:
        midpoints: the positive ones, for N(0, 1).
        entry: magnitude of the Hadamard matrix's entries, chosen so that squares do not exceed those of a key.
        inverse_entry, length_factor: 1 / entry, and the factor that corrects squares of rotated rows.
        wide: slots may exceed 2^31.
        in_order: rows are float32; only keys are multiplied, with the matrix's columns in order.
        shifted: values begin in the middle of a word; words begin with dim 4, and dims 0 to 3 are last.
        ptx: records are stored by PTX.
        block: rows of a tile.
    """

    midpoints: tuple[float, ...]
    entry: float
    inverse_entry: float
    length_factor: float
    wide: bool
    in_order: bool
    shifted: bool
    ptx: bool
    block: int


class StoreTiles(NamedTuple):
    """The number of tiles, the heads per tile, and the number of groups of heads."""

    count: Int32
    heads: Int32
    groups: Int32


@triton.jit
def _half(x, is_finite):
    """The bits (int32) of float32 x [BLOCK_R] cast to fp16, saturating; NaN if the row is not finite."""
    x = tl.minimum(tl.maximum(x, -_LARGEST_HALF), _LARGEST_HALF)
    return tl.where(is_finite, x, float("nan")).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)


@triton.jit
def _row_sum(x):
    """Sum x [BLOCK_R, D / 8, 8] to [BLOCK_R], first within a thread."""
    return tl.sum(tl.sum(x, axis=2), axis=1)


@triton.jit
def _is_finite(rows):
    """Whether each row is finite: x · 0 is 0, or NaN."""
    return _row_sum(rows * 0.0) == 0


@triton.jit
def _store_keys(record, x, valid, form: tl.constexpr, step: tl.constexpr):
    """Store rows x [BLOCK_R, D / 8, 8]: rotated keys times ``step.entry``."""
    # A rotation preserves lengths.
    norm = tl.sqrt_rn(_row_sum(x * x) * step.length_factor)
    # Rotated by a matrix of 1 and -1, a unit vector has elements of variance 1.
    direction = x * tl.div_rn(step.inverse_entry, norm + _NORM_EPSILON)[:, None, None]
    MIDPOINTS: tl.constexpr = step.midpoints
    codes = codes_of(direction, MIDPOINTS)
    store_codes(record, codes, valid, form.key_bits, form.align, step.ptx)
    half = _half(norm, norm - norm == 0)
    store_bytes(record + form.norm_offset, half, valid, 2, min(form.align, 2), step.ptx)


@triton.jit
def _store_values(record, x, valid, form: tl.constexpr, step: tl.constexpr):
    """Store rows x [BLOCK_R, D / 8, 8] of values; if ``step.shifted``, they begin with dim 4 and end with dims 0 to
    3."""
    LARGEST: tl.constexpr = (1 << form.value_bits) - 1
    HALF_ALIGN: tl.constexpr = min(form.align, 2)
    minimum, maximum = tl.min(tl.min(x, axis=2), axis=1), tl.max(tl.max(x, axis=2), axis=1)
    # In a row that is not finite, the products are NaN, except for an infinity at its own index.
    is_finite = _is_finite(x) if step.in_order else maximum * 0.0 + minimum * 0.0 == 0
    scale = tl.maximum(tl.div_rn(maximum - minimum, LARGEST * 1.0), _SMALLEST_VALUE_SCALE)
    # At most LARGEST, except in a row that is not finite, whose codes are undefined.
    steps = (quotient(x - minimum[:, None, None], scale[:, None, None]) + 0.5).to(tl.int32)
    scale_half = _half(scale, is_finite)
    if step.shifted:
        words = pack(steps, 4)
        place = tl.arange(0, form.head_dim // 8)[None, :]
        is_last = place == form.head_dim // 8 - 1
        address = record[:, None] + (form.value_offset + 2) + place * 4
        store(address, words, valid[:, None] & (place != form.head_dim // 8 - 1), 4, step.ptx)
        last = tl.sum(tl.where(is_last, words, 0), axis=1)
        store(record + form.value_offset, last >> 16, valid, 2, step.ptx)
        store(record + form.scale_offset - 2, (last & 0xFFFF) | (scale_half << 16), valid, 4, step.ptx)
    else:
        ALIGN: tl.constexpr = form.align if form.value_offset % 4 == 0 else HALF_ALIGN
        store_codes(record + form.value_offset, steps, valid, form.value_bits, ALIGN, step.ptx)
        store_bytes(record + form.scale_offset, scale_half, valid, 2, HALF_ALIGN, step.ptx)
    store_bytes(record + form.scale_offset + 2, _half(minimum, is_finite), valid, 2, HALF_ALIGN, step.ptx)


@triton.jit
def _matrix(dtype: tl.constexpr, VALUES: tl.constexpr, form: tl.constexpr, step: tl.constexpr):
    """The matrix [D, D] that rows of values, or of keys, are multiplied by."""
    BITS: tl.constexpr = form.value_bits if VALUES else form.key_bits
    dims = tl.arange(0, form.head_dim)
    columns = dims
    if not step.in_order:
        columns = column_dims(form.head_dim, 4 if VALUES and step.shifted else 0, BITS == 3)
    if VALUES:
        matrix = tl.where(dims[:, None] == columns[None, :], 1.0, 0.0)
    else:
        matrix = tl.where(parity(dims[:, None] & columns[None, :]) == 0, step.entry, -step.entry)
    return matrix.to(dtype)


@triton.jit
def _store_tiles(rows, cache, slots, tiles, VALUES: tl.constexpr, form: tl.constexpr, step: tl.constexpr):
    """Store a program's tiles, of values or of keys."""
    tokens = step.block // tiles.heads
    IS_ROTATED: tl.constexpr = not VALUES and form.key_bits < 8
    matrix = _matrix(tl.float32 if INTERPRETED else rows.start.dtype.element_ty, VALUES, form, step)
    dims = tl.arange(0, form.head_dim)
    row = tl.arange(0, step.block)
    row_token, row_head = (row // tiles.heads).to(tl.int64), (row % tiles.heads).to(tl.int64)
    row_offset = (row_token * rows.token_stride + row_head * rows.head_stride) * rows.align
    # Four programs per SM hide each other's loads; prefetching would leave room for two only.
    for tile in tl.range(tl.program_id(0), tiles.count, tl.num_programs(0), num_stages=1):
        first_token = (tile // tiles.groups).to(tl.int64) * tokens
        first_head = (tile % tiles.groups).to(tl.int64) * tiles.heads
        token = first_token + row_token
        first_row = rows.start + (first_token * rows.token_stride + first_head * rows.head_stride) * rows.align
        # [BLOCK_R, D]
        x = tl.load(
            first_row + row_offset[:, None] + dims[None, :], mask=(token < slots.num_tokens)[:, None], other=0.0
        )
        valid, page, offset = locate_slots(slots, token, step.wide)
        in_page = offset * cache.stride_token + (first_head + row_head) * cache.stride_head
        record = cache.start + (page * cache.stride_page + in_page) * form.align
        if INTERPRETED:
            x = to_float32(x)
        if not VALUES and form.key_bits == 8:
            codes = float_to_e4m3(x.to(tl.float32), form.native)
            tl.store(record[:, None] + dims[None, :], codes, mask=valid[:, None])
        else:
            if IS_ROTATED or not step.in_order:
                x = tl.dot(x, matrix, input_precision="ieee")
            x = eights(x, (form.value_bits if VALUES else form.key_bits) == 3, step.in_order)
            if VALUES:
                _store_values(record, x, valid, form, step)
            else:
                _store_keys(record, x, valid, form, step)


@kernel
def turboquant_store_kernel(
    key: HeadRows,
    value: HeadRows,
    cache: RecordCache,
    slots: Slots,
    tiles: StoreTiles,
    FORM: tl.constexpr,
    STEP: tl.constexpr,
):
    if tl.program_id(1) == 1:
        _store_tiles(value, cache, slots, tiles, True, FORM, STEP)
    else:
        _store_tiles(key, cache, slots, tiles, False, FORM, STEP)
