"""Loading of records by 32-bit words, at any alignment."""

# Triton's annotations and calls are not Python's.
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import e4m3_to_float
from flashlatte.kernels.triton.turboquant import centroids_of, load_codes
from flashlatte.ops.turboquant_decode.portable.words import e4m3_operand, key_operand, spread, value_operand
from flashlatte.runtime.triton_kernel import INTERPRETED


class Records(NamedTuple):
    """The records of some keys.

    Attributes:
        words: [keys], addresses of the 32-bit words in which they begin.
        shift: [keys], bits of that word before the record, 0 or 16; 0 if ``RecordForm.align`` is 4 or more.
    """

    words: Any
    shift: Any


class Section(NamedTuple):
    """How the words of a record's codes are extracted from words of memory; the same for all keys.

    Attributes:
        first, last: [words] int32, the words of the record that contain each word.
        shift: [words], the word's bit offset in ``first``.
        upper: [words], mask of the bits that come from the record's word ``begin``.
    """

    first: Any
    last: Any
    shift: Any
    upper: Any


@triton.jit
def records_at(cache, scalar_offset, offsets, form: tl.constexpr):
    """Records that begin ``scalar_offset`` + ``offsets`` [keys] units of ``form.align`` bytes into a cache."""
    words = cache.to(tl.pointer_type(tl.uint32))
    if form.align >= 4:
        return Records(words + scalar_offset * (form.align // 4) + offsets * (form.align // 4), 0)
    else:
        halves = offsets + scalar_offset
        return Records(words + halves // 2, (halves % 2).to(tl.int32) * 16)


@triton.jit
def section(cache, never, BYTE: tl.constexpr, BITS: tl.constexpr, form: tl.constexpr):
    """The section that begins at a byte of a record, [words, 1].

    If 4-bit codes begin in the middle of a word, the first word begins with code 4 and the last word ends with code 3
    (``first_of``), so only the last word combines two addresses.
    """
    SIZE: tl.constexpr = 24 if BITS == 3 else 32
    WORDS: tl.constexpr = form.head_dim // (4 if BITS == 8 else 8)
    index = tl.arange(0, WORDS)[:, None]
    SKIPS: tl.constexpr = BITS != 3 and BYTE % 4 == 2 and form.align >= 4
    BIT: tl.constexpr = BYTE * 8 + (16 if SKIPS else 0)
    upper = tl.where(SKIPS & (index == WORDS - 1), 0xFFFF0000, 0)
    bit = index * SIZE + BIT
    # Written so that Triton detects contiguous words.
    first = index + BIT // 32 if SIZE == 32 else bit // 32
    last = index + (BIT + 31) // 32 if SIZE == 32 else (bit + SIZE - 1) // 32
    return Section(
        first,
        last,
        _pinned((bit % 32).to(tl.uint32), cache, never),
        _pinned(upper.to(tl.uint32), cache, never),
    )


@triton.jit
def _pinned(x, cache, never):
    """Make x opaque, like a load: Triton propagates an operand's layout to loads, but not through an arange.

    ``never`` is always false, but not a constant for Triton.
    """
    return tl.load(cache.to(tl.pointer_type(tl.uint32)) + x, mask=never, other=x)


def first_of(byte: int, bits: int, align: int) -> int:
    """The index of the first code in the first word of a ``section``."""
    return 4 if bits == 4 and byte % 4 == 2 and align >= 4 else 0


@triton.jit
def _load_words(records, part, BYTE: tl.constexpr, BITS: tl.constexpr, form: tl.constexpr):
    """Load uint32 words [keys, words] of all keys, with 8 codes as nibbles or 4 e4m3 values each.

    All records must be in the cache. Words are loaded as [words, keys]: in this order adjacent threads load adjacent
    words even if Triton does not detect that they are contiguous.
    """
    base = records.words[None, :]
    if form.align >= 4 and BITS != 3:
        words = tl.load(base + part.first)
        if BYTE % 4 == 2:
            begin = tl.load(records.words + BYTE // 4)[None, :]
            words = words ^ ((words ^ begin) & part.upper)
        return tl.trans(words)
    else:
        low = tl.load(base + part.first)
        high = tl.load(base + part.last)
        shift = part.shift
        if form.align < 4:
            of_record = records.shift[None, :]
            SIZE: tl.constexpr = 24 if BITS == 3 else 32
            index = tl.arange(0, form.head_dim // (4 if BITS == 8 else 8))[:, None]
            bit = index * SIZE + BYTE * 8 + of_record
            low = tl.load(base + bit // 32)
            high = tl.load(base + (bit + SIZE - 1) // 32)
            shift = (bit % 32).to(tl.uint32)
        words = (((high.to(tl.uint64) << 32) | low) >> shift.to(tl.uint64)).to(tl.uint32)
        return tl.trans(spread(words & 0xFFFFFF) if BITS == 3 else words)


@triton.jit
def _load_half(records, BYTE: tl.constexpr, form: tl.constexpr):
    """Load the fp16 values at an even byte of records, as float32 [keys]."""
    if form.align >= 4:
        word = tl.load(records.words + BYTE // 4) >> (BYTE % 4 * 8)
    else:
        bit = records.shift + BYTE * 8
        word = tl.load(records.words + bit // 32) >> (bit % 32).to(tl.uint32)
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _codes(records, BYTE: tl.constexpr, BITS: tl.constexpr, form: tl.constexpr):
    first = records.words.to(tl.pointer_type(tl.uint8)) + (records.shift // 8 + BYTE)
    exists = tl.full(records.words.shape, True, tl.int1)
    if BITS == 8:
        return tl.load(first[:, None] + tl.arange(0, form.head_dim)[None, :])
    else:
        return load_codes(first, exists, form.head_dim, BITS, 2)


@triton.jit
def load_keys(records, part, form: tl.constexpr, PACKED: tl.constexpr):
    """Load operands: [keys, D] of centroids for N(0, 1) or of e4m3 keys, and [keys, n] whose rows sum to squared
    lengths.

    PACKED: codes are unpacked by PTX.
    """
    operand: tl.constexpr = tl.float32 if INTERPRETED else tl.float16
    if PACKED:
        words = _load_words(records, part, 0, form.key_bits, form)
        if form.key_bits == 8:
            keys = e4m3_operand(words)
            return keys, keys
        else:
            return key_operand(words, form.key_bits)
    else:
        codes = _codes(records, 0, form.key_bits, form)
        # In Triton 3.6 a tuple of a constexpr is not a constexpr.
        CODEBOOK: tl.constexpr = form.codebook
        keys = e4m3_to_float(codes, form.native) if form.key_bits == 8 else centroids_of(codes, CODEBOOK)
        keys = keys.to(operand)
        return keys, keys * keys


@triton.jit
def load_norms(records, form: tl.constexpr):
    """float32 [keys]."""
    return _load_half(records, form.norm_offset, form)


@triton.jit
def load_values(records, part, form: tl.constexpr, PACKED: tl.constexpr):
    """(operand [D, keys] of codes, their scale [keys], their minimum [keys]). PACKED as for ``load_keys``."""
    if PACKED:
        codes = value_operand(_load_words(records, part, form.value_offset, form.value_bits, form))
    else:
        codes = _codes(records, form.value_offset, form.value_bits, form)
        codes = codes.to(tl.float32 if INTERPRETED else tl.float16)
    scale = _load_half(records, form.scale_offset, form)
    minimum = _load_half(records, form.scale_offset + 2, form)
    return tl.trans(codes), scale, minimum
