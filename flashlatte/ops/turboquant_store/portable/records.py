"""Packing and writing of records by the threads that hold the codes."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import store_words


@triton.jit
def column_dims(D: tl.constexpr, FIRST: tl.constexpr, THREADS_APART: tl.constexpr):
    """The dim [D] of each column of an MMA result, in which each of four threads has two adjacent columns of every
    eight.

    Four pairs of columns of a thread are eight adjacent dims. Adjacent groups of eight are in different threads or, if
    THREADS_APART, in the same thread. The first group begins with dim FIRST.
    """
    THREADS: tl.constexpr = min(4, D // 8)
    column = tl.arange(0, D)
    eight, pair = column // (8 * THREADS), column // (2 * THREADS) % 4
    thread = column // 2 % THREADS
    first = thread * (D // THREADS) + eight * 8 if THREADS_APART else eight * (8 * THREADS) + thread * 8
    return (first + 2 * pair + column % 2 + FIRST) % D


@triton.jit
def eights(x, THREADS_APART: tl.constexpr, IN_ORDER: tl.constexpr):
    """x [BLOCK_R, D] of ``column_dims`` as [BLOCK_R, D / 8, 8]."""
    R: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    THREADS: tl.constexpr = min(4, D // 8)
    if not IN_ORDER:
        x = tl.reshape(x, [R, D // (8 * THREADS), 4, THREADS, 2])
        x = tl.permute(x, (0, 3, 1, 2, 4)) if THREADS_APART else tl.permute(x, (0, 1, 3, 2, 4))
    return tl.reshape(x, [R, D // 8, 8])


_STORE = {
    size: tl.constexpr(f"{{.reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.{kind} [$1], $2; mov.b32 $0, 0;}}")
    for size, kind in ((4, "b32"), (2, "u16"), (1, "u8"))
}
_STORE_4, _STORE_2, _STORE_1 = _STORE[4], _STORE[2], _STORE[1]


@triton.jit
def store(address, words, mask, SIZE: tl.constexpr, PTX: tl.constexpr):
    """Store the lowest SIZE bytes of int32 words from the threads that hold them; tl.store would exchange data between
    threads."""
    if PTX:
        TEXT: tl.constexpr = _STORE_4 if SIZE == 4 else (_STORE_2 if SIZE == 2 else _STORE_1)
        arguments = [address.to(tl.int64), words, mask.to(tl.int32)]
        tl.inline_asm_elementwise(TEXT, "=r,l,r,r", arguments, dtype=tl.int32, is_pure=False, pack=1)
    elif SIZE == 1:
        tl.store(address, words.to(tl.uint8), mask=mask)
    else:
        store_words(address, 0, words if SIZE == 4 else words.to(tl.int16), mask, SIZE)


@triton.jit
def store_bytes(address, words, mask, BYTES: tl.constexpr, ALIGN: tl.constexpr, PTX: tl.constexpr):
    """Store the lowest BYTES of int32 words at multiples of ALIGN."""
    SIZE: tl.constexpr = min(ALIGN, 4) if BYTES % min(ALIGN, 4) == 0 else 1
    for part in tl.static_range(BYTES // SIZE):
        store(address + part * SIZE, words >> (8 * SIZE * part), mask, SIZE, PTX)


@triton.jit
def pack(codes, BITS: tl.constexpr):
    """int32 words of codes, along the last of three axes."""
    return tl.sum(codes << (tl.arange(0, codes.shape[2]) * BITS)[None, None, :], axis=2)


@triton.jit
def store_codes(record, codes, valid, BITS: tl.constexpr, ALIGN: tl.constexpr, PTX: tl.constexpr):
    """Pack codes [BLOCK_R, D / 8, 8] and store them at byte addresses [BLOCK_R]."""
    GROUPS: tl.constexpr = codes.shape[1]
    words = pack(codes, BITS)
    if BITS == 3 and GROUPS == 16:
        _store_spread(record, words, valid, ALIGN, PTX)
    else:
        address = record[:, None] + tl.arange(0, GROUPS)[None, :] * BITS
        store_bytes(address, words, valid[:, None], BITS, ALIGN, PTX)


@triton.jit
def _store_spread(record, groups, valid, ALIGN: tl.constexpr, PTX: tl.constexpr):
    """Store 24 bits of each of groups [BLOCK_R, 16]; four groups are three words of a thread."""
    even, odd = tl.split(tl.reshape(groups, [groups.shape[0], 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    address = record[:, None] + tl.arange(0, 4)[None, :] * 12
    store_bytes(address, first | (second << 24), valid[:, None], 4, ALIGN, PTX)
    store_bytes(address + 4, (second >> 8) | (third << 16), valid[:, None], 4, ALIGN, PTX)
    store_bytes(address + 8, (third >> 16) | (fourth << 8), valid[:, None], 4, ALIGN, PTX)
