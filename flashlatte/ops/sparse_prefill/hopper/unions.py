"""The union of the selections of a group of adjacent query tokens: one list of tokens, each with the set of members
that selected it.

A bitmap in shared memory, for a window of positions of kv at a time, has four bits per position, one for each member of
the group. The list has the positions in ascending order. A bitmap cannot represent a member that selects a position
twice: for such a group, the list is the concatenation of the selections.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.hopper.ptx import shared_words
from flashlatte.kernels.triton.selections import TokenSelections, first_index, selected_count, selections_of
from flashlatte.runtime import machine
from flashlatte.runtime.kernel_records import ElementPointer
from flashlatte.runtime.triton_kernel import INTERPRETED, kernel

# An entry of the list is position << MEMBER_BITS | members, or -1 for nothing.
MEMBER_BITS = tl.constexpr(4)
MEMBERS = tl.constexpr(15)
MAX_POSITIONS = 2**27
# Positions in a word of the bitmap.
PER_WORD = tl.constexpr(8)
# Words of the bitmap; and words or indices that a program processes at a time, at least one per thread.
WORDS = 4096
BLOCK = 1024


class Union(NamedTuple):
    """The unions of groups of query tokens, all int32.

    Attributes:
        entries: [groups, group · topk]; the first ``counts`` [groups] entries are valid.
        damaged: [groups], zeros; written by the attention kernel.
    """

    entries: ElementPointer
    counts: ElementPointer
    damaged: ElementPointer


def build_unions(indices: torch.Tensor, topk_length: torch.Tensor | None, s_kv: int, group: int) -> Union:
    """Unions of groups of ``group`` adjacent tokens, given ``indices`` [s_q, 1, topk] and ``topk_length`` [s_q] or
    None."""
    s_q, _, topk = indices.shape
    groups = -(-s_q // group)
    int32_options = {"dtype": torch.int32, "device": indices.device}
    union = Union(
        torch.empty(groups, group * topk, **int32_options),
        torch.empty(groups, **int32_options),
        torch.empty(groups, **int32_options),
    )
    union_kernel[(groups,)](
        selections_of(indices, topk_length, s_kv),
        union,
        interpreted_memory=torch.empty(groups, WORDS, dtype=torch.int32) if machine.interpreting() else None,
        tokens=s_q,
        GROUP=group,
        WORDS=WORDS,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return union


@kernel
def union_kernel(
    selections: TokenSelections,
    union: Union,
    interpreted_memory,
    tokens: tl.int32,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program writes the entries of one group, their count, and 0 to ``damaged``.

    ``interpreted_memory``: int32 [groups, WORDS] in place of shared memory in Triton's interpreter, else None.
    """
    group = tl.program_id(0)
    first = group * GROUP
    s_kv = selections.s_kv
    entries = union.entries + group.to(tl.int64) * GROUP * selections.topk
    memory = interpreted_memory + group * WORDS if INTERPRETED else shared_words.allocate(WORDS)
    lane_offset = tl.arange(0, BLOCK)
    selected = tl.zeros_like(lane_offset)
    listed = tl.zeros_like(lane_offset)
    count = tl.zeros([], tl.int32)
    for window in range(0, s_kv, WORDS * PER_WORD):
        positions = tl.minimum(s_kv - window, WORDS * PER_WORD)
        words = tl.cdiv(positions, PER_WORD)
        for begin in range(0, words, BLOCK):
            shared_words.store(memory, begin + lane_offset, tl.zeros_like(lane_offset), begin + lane_offset < words)
        tl.debug_barrier()
        for member in tl.static_range(GROUP):
            row, length = selection_of(selections, first + member, tokens)
            for begin in range(0, length, BLOCK):
                index = tl.load(row + begin + lane_offset, mask=begin + lane_offset < length, other=-1)
                inside = (index >= window) & (index < window + positions)
                position = tl.where(inside, index, window).to(tl.int32) - window
                bit = (tl.zeros_like(position) + (1 << member)) << ((position % PER_WORD) * MEMBER_BITS)
                shared_words.set_bits(memory, position // PER_WORD, bit, inside)
                selected += inside.to(tl.int32)
        tl.debug_barrier()
        for begin in range(0, words, BLOCK):
            word = shared_words.load(memory, begin + lane_offset, begin + lane_offset < words)
            listed += shared_words.popcount(word)
            present = (word | (word >> 1) | (word >> 2) | (word >> 3)) & 0x11111111
            ones = shared_words.popcount(present)
            entry = count + tl.cumsum(ones, axis=0) - ones
            for eighth in tl.static_range(PER_WORD):
                members = (word >> (eighth * MEMBER_BITS)) & MEMBERS
                position = window + (begin + lane_offset) * PER_WORD + eighth
                tl.store(entries + entry, (position << MEMBER_BITS) | members, mask=members != 0)
                entry += (members != 0).to(tl.int32)
            count += tl.sum(ones, axis=0)
        tl.debug_barrier()

    if tl.sum(selected - listed, axis=0) != 0:
        count = tl.zeros([], tl.int32)
        for member in tl.static_range(GROUP):
            row, length = selection_of(selections, first + member, tokens)
            for begin in range(0, length, BLOCK):
                index = tl.load(row + begin + lane_offset, mask=begin + lane_offset < length, other=-1)
                inside = (index >= 0) & (index < s_kv)
                entry = tl.where(inside, (index.to(tl.int32) << MEMBER_BITS) | (1 << member), -1)
                tl.store(entries + count + begin + lane_offset, entry, mask=begin + lane_offset < length)
            count += length
    tl.store(union.counts + group, count)
    tl.store(union.damaged + group, 0)


@triton.jit
def selection_of(selections, token, tokens):
    """Pointer to a token's first index, and the number of its indices; 0 after the last token."""
    existing = tl.minimum(token, tokens - 1)
    length = selected_count(selections, existing, selections.topk)
    return first_index(selections, existing), tl.where(token < tokens, length, 0)
