"""The list of candidates: entries of a row that reach a threshold, with their columns. Each CTA lists its share of the
row."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.hopper.ptx import shared_words
from flashlatte.kernels.triton.fp8 import to_float32
from flashlatte.ops.topk.hopper.shared_layout import COUNTER, LIST


class TopkRow(NamedTuple):
    """The ``length`` entries of ``logits`` from element ``first`` on; the CTA lists and stores columns ``begin`` to
    ``stop``."""

    logits: Any
    first: Any
    length: Any
    begin: Any
    stop: Any


@triton.jit
def whole_blocks(logits, first, length, BLOCK: tl.constexpr):
    """Split ``length`` entries from element ``first`` on. Returns the number of entries before the first one that is
    aligned to 16 bytes (if ``logits`` is), the element of that one, and the number of whole blocks from there.
    """
    VECTOR: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth
    aligned = (first + VECTOR - 1) // VECTOR * VECTOR
    head = tl.minimum((aligned - first).to(tl.int32), length)
    return head, aligned, (length - head) // BLOCK


@triton.jit
def load_first_block(row, BLOCK: tl.constexpr):
    """Start loading the first whole block of ``append_candidates``, 16 bytes at a time; zeros if there is none."""
    _, aligned, blocks = whole_blocks(row.logits, row.first + row.begin, row.stop - row.begin, BLOCK)
    offset = tl.arange(0, BLOCK)
    return tl.load(row.logits + aligned + offset, mask=(offset >= 0) & (blocks > 0), other=0.0)


@triton.jit
def append_candidates(row, threshold, loaded, memory, CONFIG: tl.constexpr):
    """Append the entries >= ``threshold`` (never NaN) of the CTA's columns of a row, and count them. ``loaded``: the
    result of ``load_first_block``.
    """
    CAPACITY: tl.constexpr = CONFIG.capacity
    BLOCK: tl.constexpr = CONFIG.block
    logits, begin = row.logits, row.begin
    first = row.first + begin
    length = row.stop - begin
    head, aligned, blocks = whole_blocks(logits, first, length, BLOCK)
    offset = tl.arange(0, BLOCK)
    for block in range(blocks):
        values = to_float32(loaded)
        # Prefetch the next block; in the last iteration reload the last block instead of reading past it.
        loaded = tl.load(logits + aligned + tl.minimum(block + 1, blocks - 1).to(tl.int64) * BLOCK + offset)
        column = begin + head + block * BLOCK + offset
        shared_words.append_at_least(memory, COUNTER, LIST, values, column, threshold, CAPACITY)

    rest = length - blocks * BLOCK
    for rest_begin in range(0, rest, BLOCK):
        offset = rest_begin + tl.arange(0, BLOCK)
        column = tl.where(offset < head, offset, offset + blocks * BLOCK)
        values = to_float32(tl.load(logits + first + column, mask=offset < rest, other=float("nan")))
        shared_words.append_at_least(memory, COUNTER, LIST, values, begin + column, threshold, CAPACITY)


@triton.jit
def locate_candidates(memory, CAPACITY: tl.constexpr, CTAS: tl.constexpr):
    """The number of candidates of all CTAs of a row, and their addresses [CAPACITY], concatenated over the CTAs, for
    ``load_candidates``.
    """
    offset = tl.arange(0, CAPACITY)
    if CTAS == 1:
        return shared_words.load(memory, COUNTER, tl.full([], True, tl.int1)), LIST + 2 * offset
    else:
        source = tl.zeros_like(offset)
        count = tl.zeros([], tl.int32)
        for rank in tl.static_range(CTAS):
            peer = shared_words.map_to_cta(memory, rank)
            # A pair takes eight bytes.
            source = tl.where(offset >= count, peer + LIST * 4 + (offset - count) * 8, source)
            count += shared_words.load_cluster(peer + COUNTER * 4)
        return count, source


@triton.jit
def load_candidates(memory, source, valid, CTAS: tl.constexpr):
    """The values of candidates as bits, and their columns, in any order."""
    if CTAS == 1:
        return shared_words.load_two(memory, source, valid)
    else:
        return shared_words.load_two_cluster(source, valid)
