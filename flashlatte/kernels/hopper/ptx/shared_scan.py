"""Prefix sums over counters and bitmaps in shared memory, by all threads of a CTA together.

Counters and bitmaps are written with ``shared_words``. Each function begins and ends with a CTA barrier, so it reads
all earlier writes, and they may be overwritten after it. Triton's scan takes three times as many instructions, because
each thread adds up all warps.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import itertools

import triton
import triton.language as tl
from triton.language.extra.cuda import num_warps

from flashlatte.kernels.hopper.ptx import shared_words
from flashlatte.runtime.triton_kernel import INTERPRETED


@triton.constexpr_function
def _scan(steps):
    """PTX for an inclusive scan of ``upto`` over the lanes of a warp."""
    return " ".join(
        f"shfl.sync.up.b32 other|p, upto, {1 << step}, 0, -1; @p add.s32 upto, upto, other;" for step in range(steps)
    )


@triton.constexpr_function
def _load(names, address):
    """PTX that loads adjacent words."""
    if len(names) == 1:
        return f"ld.shared.b32 {names[0]}, [{address}];"
    wide = min(len(names), 4)
    return " ".join(
        f"ld.shared.v{wide}.b32 {{{', '.join(names[i : i + wide])}}}, [{address}+{4 * i}];"
        for i in range(0, len(names), wide)
    )


@triton.constexpr_function
def _sum(result, names):
    return " ".join([f"mov.b32 {result}, {names[0]};", *(f"add.s32 {result}, {result}, {n};" for n in names[1:])])


@triton.constexpr_function
def _bin_asm(bins, warps):
    each = bins // (32 * warps)
    names = [f"n{i}" for i in range(each)]
    walk = [
        f"add.s32 upto, upto, {name}; setp.lt.s32 p, upto, $6; "
        f"@p mov.b32 before, upto; @p add.s32 bin, bin, 1; @p mov.b32 inside, {following};"
        for name, following in itertools.pairwise(names)
    ]
    return " ".join(
        [
            "{ .reg .pred p; .reg .b32 lane, warp, address, own, upto, other, first, before, bin, inside,",
            f"{', '.join(names)};",
            "bar.sync 0;",
            "mov.u32 lane, %laneid; mov.u32 warp, %tid.x;",
            f"mad.lo.s32 address, warp, {4 * each}, $4; {_load(names, 'address')} {_sum('own', names)}",
            "redux.sync.add.s32 own, own, -1; shr.u32 warp, warp, 5; mad.lo.s32 address, warp, 4, $5;",
            "setp.eq.s32 p, lane, 0; @p st.shared.b32 [address], own;",
            "bar.sync 0;",
            # Each warp finds the warp whose bins reach the rank: one lane per warp.
            f"mad.lo.s32 address, lane, 4, $5; setp.lt.s32 p, lane, {warps}; mov.b32 own, 0;",
            "@p ld.shared.b32 own, [address]; mov.b32 upto, own;",
            _scan(warps.bit_length() - 1),
            "setp.ge.s32 p, upto, $6; vote.sync.ballot.b32 first, p, -1; brev.b32 first, first; clz.b32 first, first;",
            f"min.s32 first, first, {warps - 1}; sub.s32 upto, upto, own;",
            "shfl.sync.idx.b32 before, upto, first, 31, -1;",
            # Then the lane whose bins reach it, and the bin.
            f"mad.lo.s32 bin, first, 32, lane; mul.lo.s32 bin, bin, {each};",
            f"mad.lo.s32 address, bin, 4, $4; {_load(names, 'address')} {_sum('own', names)} mov.b32 upto, own;",
            _scan(5),
            "add.s32 upto, upto, before; setp.ge.s32 p, upto, $6; vote.sync.ballot.b32 first, p, -1;",
            "brev.b32 first, first; clz.b32 first, first; sub.s32 before, upto, own;",
            f"mov.b32 upto, before; mov.b32 inside, {names[0]};",
            *walk,
            "shfl.sync.idx.b32 $0, bin, first, 31, -1; shfl.sync.idx.b32 $1, before, first, 31, -1;",
            "shfl.sync.idx.b32 $2, inside, first, 31, -1; mov.b32 $3, 0;",
            "bar.sync 0; }",
        ]
    )


@triton.jit
def find_bin_of_rank(memory, bins, scratch, rank, BINS: tl.constexpr):
    """Find the first of BINS counters at word ``bins`` whose inclusive prefix sum is at least ``rank``; the total
    must be.

    ``bins`` is a multiple of 4, BINS a power of two and at least 64 per warp; ``scratch`` has one word per warp.

    Returns its index, the sum of the counters before it, and its count.
    """
    if INTERPRETED:
        position = tl.arange(0, BINS)
        counts = shared_words.load(memory, bins + position, position >= 0)
        inclusive = tl.cumsum(counts, axis=0)
        found = tl.sum((inclusive < rank).to(tl.int32), axis=0)
        above = tl.sum(tl.where(position < found, counts, 0), axis=0)
        return found, above, tl.sum(tl.where(position == found, counts, 0), axis=0)
    else:
        found, above, inside, _ = tl.inline_asm_elementwise(
            _bin_asm(BINS, num_warps()),
            "=&r,=&r,=&r,=&r,r,r,r",
            [memory + bins * 4, memory + scratch * 4, rank],
            (tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
        return found, above, inside


@triton.constexpr_function
def _ones_asm(words, warps):
    each = words // (32 * warps)
    names = [f"n{i}" for i in range(each)]
    pairs = names[::2]
    return " ".join(
        [
            f"{{ .reg .pred p; .reg .b32 lane, warp, address, own, upto, other, {', '.join(names)};",
            "bar.sync 0;",
            "mov.u32 lane, %laneid; mov.u32 warp, %tid.x;",
            f"mad.lo.s32 address, warp, {4 * each}, $1; {_load(names, 'address')}",
            *(f"popc.b32 {name}, {name};" for name in names),
            *(f"add.s32 {one}, {one}, {other};" for one, other in zip(pairs, names[1::2], strict=True)),
            f"{_sum('own', pairs)} mov.b32 upto, own;",
            _scan(5),
            "shr.u32 warp, warp, 5; mad.lo.s32 address, warp, 4, $3;",
            "setp.eq.s32 p, lane, 31; @p st.shared.b32 [address], upto; sub.s32 own, upto, own;",
            "bar.sync 0;",
            f"mad.lo.s32 address, lane, 4, $3; setp.lt.s32 p, lane, {warps}; mov.b32 upto, 0;",
            "@p ld.shared.b32 upto, [address]; redux.sync.add.s32 $0, upto, -1;",
            "setp.lt.s32 p, lane, warp; selp.s32 upto, upto, 0, p; redux.sync.add.s32 upto, upto, -1;",
            "add.s32 own, own, upto; add.s32 own, own, $4; add.s32 $0, $0, $4;",
            f"mov.u32 address, %tid.x; mad.lo.s32 address, address, {2 * each}, $2;",
            *(f"st.shared.b32 [address+{4 * i}], own; add.s32 own, own, {name};" for i, name in enumerate(pairs)),
            "bar.sync 0; }",
        ]
    )


@triton.jit
def popcount_prefix_sums(memory, bitmap, sums, scratch, before, WORDS: tl.constexpr):
    """Store at word ``sums`` the number of set bits before each pair of words of a bitmap of WORDS words, plus
    ``before``.

    ``bitmap`` is a multiple of 4, WORDS a power of two and at least 64 per warp; ``scratch`` has one word per warp.

    Returns ``before`` plus the number of all set bits.
    """
    if INTERPRETED:
        pair = tl.arange(0, WORDS // 2)
        first, second = shared_words.load_two(memory, bitmap + 2 * pair, pair >= 0)
        ones = shared_words.popcount(first) + shared_words.popcount(second)
        inclusive = before + tl.cumsum(ones, axis=0)
        shared_words.store(memory, sums + pair, inclusive - ones, pair >= 0)
        return tl.max(inclusive, axis=0)
    else:
        return tl.inline_asm_elementwise(
            _ones_asm(WORDS, num_warps()),
            "=&r,r,r,r,r",
            [memory + bitmap * 4, memory + sums * 4, memory + scratch * 4, before],
            tl.int32,
            is_pure=False,
            pack=1,
        )
