"""Entries of a row that reach a threshold, listed with their columns: each CTA lists those of its part of the row."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.hopper.ptx import shared_words
from flashlatte.kernels.triton.fp8 import to_float32
from flashlatte.ops.topk.hopper.memory import COUNTER, LIST


@triton.jit
def whole_blocks(logits, first, length, BLOCK: tl.constexpr):
    """Of ``length`` entries from element ``first`` on: those before the first whose address is a multiple of 16 bytes
    (where that of ``logits`` is), the element after them, and how many whole blocks begin there.
    """
    VECTOR: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth
    aligned = (first + VECTOR - 1) // VECTOR * VECTOR
    head = tl.minimum((aligned - first).to(tl.int32), length)
    return head, aligned, (length - head) // BLOCK


@triton.jit
def first_block(logits, first, length, BLOCK: tl.constexpr):
    """The first whole block that ``list_reaching`` reads, 16 bytes at a time; zeros if there is none."""
    _, aligned, blocks = whole_blocks(logits, first, length, BLOCK)
    place = tl.arange(0, BLOCK)
    return tl.load(logits + aligned + place, mask=(place >= 0) & (blocks > 0), other=0.0)


@triton.jit
def list_reaching(
    logits,
    first,
    begin,
    stop,
    threshold,
    loaded,
    memory,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """List the entries >= ``threshold`` from column ``begin`` to ``stop`` of a row that begins at element ``first`` of
    ``logits``, and count them; NaN is none of them. ``loaded``: their ``first_block``.
    """
    first += begin
    length = stop - begin
    head, aligned, blocks = whole_blocks(logits, first, length, BLOCK)
    place = tl.arange(0, BLOCK)
    for block in range(blocks):
        values = to_float32(loaded, INTERPRETED)
        # The next block is on its way while this one is listed; the last one once more, rather than what follows.
        loaded = tl.load(logits + aligned + tl.minimum(block + 1, blocks - 1).to(tl.int64) * BLOCK + place)
        column = begin + head + block * BLOCK + place
        shared_words.append_reaching(memory, COUNTER, LIST, values, column, threshold, CAPACITY, INTERPRETED)

    rest = length - blocks * BLOCK
    for rest_begin in range(0, rest, BLOCK):
        offset = rest_begin + tl.arange(0, BLOCK)
        column = tl.where(offset < head, offset, offset + blocks * BLOCK)
        values = to_float32(tl.load(logits + first + column, mask=offset < rest, other=float("nan")), INTERPRETED)
        shared_words.append_reaching(memory, COUNTER, LIST, values, begin + column, threshold, CAPACITY, INTERPRETED)


@triton.jit
def places_of_listed(memory, CAPACITY: tl.constexpr, CTAS: tl.constexpr, INTERPRETED: tl.constexpr):
    """How many entries all CTAs of a row listed, and where they are, one CTA's behind the other's [CAPACITY]: for
    ``load_listed``.
    """
    place = tl.arange(0, CAPACITY)
    if CTAS == 1:
        return shared_words.load(memory, COUNTER, tl.full([], True, tl.int1), INTERPRETED), LIST + 2 * place
    else:
        source = tl.zeros_like(place)
        count = tl.zeros([], tl.int32)
        for rank in tl.static_range(CTAS):
            theirs = shared_words.of_cta(memory, rank)
            # A pair has eight bytes.
            source = tl.where(place >= count, theirs + LIST * 4 + (place - count) * 8, source)
            count += shared_words.load_of_cluster(theirs + COUNTER * 4)
        return count, source


@triton.jit
def load_listed(memory, source, there, CTAS: tl.constexpr, INTERPRETED: tl.constexpr):
    """The bits of the values of listed entries, and their columns, in any order."""
    if CTAS == 1:
        return shared_words.load_two(memory, source, there, INTERPRETED)
    else:
        return shared_words.load_two_of_cluster(source, there)
