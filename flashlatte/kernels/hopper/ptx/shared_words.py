"""Shared memory that a Triton kernel addresses directly by words: lists, counters and bitmaps, with atomic operations.

The words are a PTX variable outside of Triton's allocations, so Triton inserts no barriers for them: call
``tl.debug_barrier`` before reading what other threads have written. Tensors must have at least one element per thread;
a shorter tensor is replicated, and each copy would count.

In Triton's interpreter, ``memory`` is a pointer to words of global memory.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.runtime.triton_kernel import INTERPRETED

# Elements of a thread per call of ``append_at_least``.
APPENDED_AT_ONCE = tl.constexpr(16)


@triton.constexpr_function
def _allocate_asm(words):
    # A variable of this scope nevertheless belongs to the whole CTA.
    return f"{{ .shared .align 16 .b32 words[{words}]; mov.u32 $0, words; }}"


@triton.jit
def allocate(WORDS: tl.constexpr):
    """Allocate WORDS words and return their address. At most 12,288 words per kernel; call once, at the start of a
    kernel."""
    return tl.inline_asm_elementwise(
        _allocate_asm(WORDS), "=r,r", [tl.zeros([], tl.int32)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def map_to_cta(memory, rank):
    """The address of ``memory`` in CTA ``rank`` of the cluster. All CTAs must run the same kernel."""
    return tl.inline_asm_elementwise(
        "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", [memory, rank], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def cluster_arrive():
    """Arrive at the cluster barrier with release semantics."""
    tl.inline_asm_elementwise(
        "barrier.cluster.arrive.release; mov.b32 $0, $1;",
        "=r,r",
        [tl.full([], 0, tl.int32)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def cluster_wait():
    """Wait at the cluster barrier, with acquire semantics."""
    tl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire; mov.b32 $0, $1;",
        "=r,r",
        [tl.full([], 0, tl.int32)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


_LOAD = tl.constexpr("{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.shared.b32 $0, [$1]; }")
_LOAD_TWO = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; @p ld.shared.v2.b32 {$0, $1}, [$2]; }"
)
_LOAD_TWO_CLUSTER = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; @p ld.shared::cluster.v2.b32 {$0, $1}, [$2]; }"
)
_STORE = tl.constexpr("{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.b32 $0, 0; }")
_STORE_BYTE = tl.constexpr("{ .reg .b16 byte; cvt.u16.u32 byte, $2; st.shared.b8 [$1], byte; mov.b32 $0, 0; }")
_COUNT = tl.constexpr("{ .reg .pred p; setp.ne.s32 p, $2, 0; @p red.shared.add.u32 [$1], 1; mov.b32 $0, 0; }")
_SET = tl.constexpr("{ .reg .pred p; setp.ne.s32 p, $3, 0; @p red.shared.or.b32 [$1], $2; mov.b32 $0, 0; }")


@triton.jit
def load(memory, position, mask):
    """Load int32 words; 0 where not ``mask``."""
    if INTERPRETED:
        return tl.load(memory + position, mask=mask, other=0)
    else:
        return tl.inline_asm_elementwise(
            _LOAD, "=&r,r,r", [memory + position * 4, mask.to(tl.int32)], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def load_two(memory, position, mask):
    """Load two adjacent words, the first at an even position; 0 where not ``mask``."""
    if INTERPRETED:
        return tl.load(memory + position, mask=mask, other=0), tl.load(memory + position + 1, mask=mask, other=0)
    else:
        return tl.inline_asm_elementwise(
            _LOAD_TWO,
            "=&r,=&r,r,r",
            [memory + position * 4, mask.to(tl.int32)],
            (tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )


@triton.jit
def load_cluster(address):
    """Load the int32 word at an address of ``map_to_cta``."""
    return tl.inline_asm_elementwise(
        "ld.shared::cluster.b32 $0, [$1];", "=r,r", [address], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_two_cluster(address, mask):
    """Load two adjacent int32 words at addresses of ``map_to_cta``; 0 where not ``mask``."""
    return tl.inline_asm_elementwise(
        _LOAD_TWO_CLUSTER,
        "=&r,=&r,r,r",
        [address, mask.to(tl.int32)],
        (tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def store(memory, position, words, mask):
    if INTERPRETED:
        tl.store(memory + position, words, mask=mask)
    else:
        tl.inline_asm_elementwise(
            _STORE, "=r,r,r,r", [memory + position * 4, words, mask.to(tl.int32)], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def store_bytes(memory, position, offset, bytes):
    """Store the lowest byte of each element at byte ``offset`` from word ``position``."""
    if INTERPRETED:
        tl.store((memory + position).to(tl.pointer_type(tl.int8)) + offset, bytes.to(tl.int8))
    else:
        tl.inline_asm_elementwise(
            _STORE_BYTE,
            "=r,r,r",
            [memory + position * 4 + offset, bytes.to(tl.int32)],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def count(memory, position, mask):
    """Atomically add 1 to the word at each position."""
    if INTERPRETED:
        tl.atomic_add(memory + position, 1, mask=mask)
    else:
        tl.inline_asm_elementwise(
            _COUNT, "=r,r,r", [memory + position * 4, mask.to(tl.int32)], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def set_bits(memory, position, bits, mask):
    """Atomically set bits of words."""
    if INTERPRETED:
        tl.atomic_or(memory + position, bits, mask=mask)
    else:
        tl.inline_asm_elementwise(
            _SET, "=r,r,r,r", [memory + position * 4, bits, mask.to(tl.int32)], tl.int32, is_pure=False, pack=1
        )


@triton.constexpr_function
def _append_asm(entries, capacity):
    # Operands: ``entries`` each of results, values, columns, and copies of the threshold and of the addresses of
    # counter and list.
    values = [f"${entries + i}" for i in range(entries)]
    columns = [f"${2 * entries + i}" for i in range(entries)]
    threshold, counter, list_address = (f"${n * entries}" for n in (3, 4, 5))
    return " ".join(
        [
            "{ .reg .b32 own, upto, other, target; .reg .f32 least; .reg .pred p;",
            "mov.b32 own, 0;",
            *(f"setp.ge.f32 p, {value}, {threshold}; @p add.s32 own, own, 1;" for value in values),
            "mov.b32 upto, own;",
            *(
                f"shfl.sync.up.b32 other|p, upto, {distance}, 0, -1; @p add.s32 upto, upto, other;"
                for distance in (1, 2, 4, 8, 16)
            ),
            # The last lane adds the warp's total.
            "mov.u32 target, %laneid; setp.eq.s32 p, target, 31; mov.b32 target, 0;",
            f"@p atom.shared.add.u32 target, [{counter}], upto;",
            "shfl.sync.idx.b32 target, target, 31, 31, -1;",
            "add.s32 upto, upto, target; sub.s32 target, upto, own;",
            # No value is >= NaN.
            f"setp.le.s32 p, upto, {capacity}; selp.f32 least, {threshold}, 0f7FFFFFFF, p;",
            f"mad.lo.s32 target, target, 8, {list_address};",
            *(
                f"setp.ge.f32 p, {value}, least; @p st.shared.v2.b32 [target], {{{value}, {column}}}; "
                "@p add.s32 target, target, 8;"
                for value, column in zip(values, columns, strict=True)
            ),
            *(f"mov.b32 ${i}, 0;" for i in range(entries)),
            "}",
        ]
    )


@triton.constexpr_function
def _append_constraints(entries):
    return ",".join(["=&r"] * entries + ["f"] * entries + ["r"] * entries + ["f"] * entries + ["r"] * (2 * entries))


@triton.jit
def append_at_least(memory, counter, position, values, column, threshold, CAPACITY: tl.constexpr):
    """Append the float32 ``values`` >= ``threshold`` with their columns to a list of pairs, in any order.

    The list begins at word ``position``; the word at ``counter`` is its length. The counter also counts entries beyond
    CAPACITY; a thread whose entries would exceed CAPACITY stores none of them. Each thread must hold a multiple of
    APPENDED_AT_ONCE elements.
    """
    if INTERPRETED:
        passes = (values >= threshold).to(tl.int32)
        before = tl.load(memory + counter)
        tl.store(memory + counter, before + tl.sum(passes, axis=0))
        entry = before + tl.cumsum(passes, axis=0) - passes
        stored = (passes == 1) & (entry < CAPACITY)
        tl.store(memory + position + 2 * entry, values.to(tl.int32, bitcast=True), mask=stored)
        tl.store(memory + position + 2 * entry + 1, column, mask=stored)
    else:
        zero = tl.zeros_like(column)
        tl.inline_asm_elementwise(
            _append_asm(APPENDED_AT_ONCE, CAPACITY),
            _append_constraints(APPENDED_AT_ONCE),
            [
                values,
                column,
                zero.to(tl.float32) + threshold,
                zero + (memory + counter * 4),
                zero + (memory + position * 4),
            ],
            tl.int32,
            is_pure=False,
            pack=APPENDED_AT_ONCE,
        )


@triton.jit
def popcount(words):
    """The number of set bits of each word."""
    if INTERPRETED:
        ones = tl.zeros_like(words)
        for bit in tl.static_range(32):
            ones += (words >> bit) & 1
        return ones
    else:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [words], tl.int32, is_pure=True, pack=1)


@triton.jit
def bit_length(number):
    """The bit length of an unsigned 32-bit value, given as int32."""
    if INTERPRETED:
        bits = tl.zeros_like(number)
        for bit in tl.static_range(32):
            bits = tl.where(((number >> bit) & 1) != 0, bit + 1, bits)
        return bits
    else:
        zeros = tl.inline_asm_elementwise("clz.b32 $0, $1;", "=r,r", [number], tl.int32, is_pure=True, pack=1)
        return 32 - zeros


_COUNT_BITS_BEFORE = tl.constexpr(
    " ".join(
        [
            "{ .reg .pred p; .reg .b32 pair, address, lower, upper, below;",
            "setp.ne.s32 p, $4, 0; mov.b32 $0, 0; mov.b32 lower, 0; mov.b32 upper, 0;",
            "shr.u32 pair, $3, 6; shl.b32 pair, pair, 2;",
            "add.s32 address, pair, $2; @p ld.shared.b32 $0, [address];",
            "shl.b32 pair, pair, 1; add.s32 address, pair, $1; @p ld.shared.v2.b32 {lower, upper}, [address];",
            "bmsk.wrap.b32 below, 0, $3; and.b32 address, $3, 32; setp.ne.s32 p, address, 0;",
            "@p and.b32 upper, upper, below; @!p and.b32 lower, lower, below; @!p mov.b32 upper, 0;",
            "popc.b32 lower, lower; popc.b32 upper, upper; add.s32 $0, $0, lower; add.s32 $0, $0, upper; }",
        ]
    )
)


@triton.jit
def count_bits_before(memory, bitmap, sums, bit, mask):
    """The number of set bits before ``bit`` in the bitmap at word ``bitmap`` (even); 0 where not ``mask``. The words at
    ``sums`` are the prefix sums of ``shared_scan.popcount_prefix_sums``.
    """
    if INTERPRETED:
        lower, upper = load_two(memory, bitmap + 2 * (bit >> 6), mask)
        below = (tl.zeros_like(bit) + 1 << (bit & 31)) - 1
        in_upper = (bit & 32) != 0
        ones = load(memory, sums + (bit >> 6), mask)
        ones += popcount(tl.where(in_upper, lower, lower & below))
        return ones + popcount(tl.where(in_upper, upper & below, 0))
    else:
        zero = tl.zeros_like(bit)
        return tl.inline_asm_elementwise(
            _COUNT_BITS_BEFORE,
            "=&r,r,r,r,r",
            [zero + (memory + bitmap * 4), zero + (memory + sums * 4), bit, mask.to(tl.int32)],
            tl.int32,
            is_pure=False,
            pack=1,
        )
