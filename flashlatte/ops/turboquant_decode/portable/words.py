"""Conversion of codes to tensor-core operands in registers, by a few PTX instructions per word of eight codes.

An MMA may sum over a key's dims in any order if the query has the same order, and a value's dims may be output in any
order. So a thread unpacks whole words to the operand elements that it holds (``key_operand``, ``value_operand``), and
nothing goes through shared memory. ``key_dims`` and ``value_dims`` define the order of dims.

Triton propagates an operand's layout back to the loads if there are only loads, constants, arithmetic and views in
between. With 16-bit operands, along the summed axis, each of 4 threads holds every fourth group of 4 elements; along
the other axis, each of 8 threads holds every eighth element.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false

from __future__ import annotations

import struct

import triton
import triton.language as tl

from flashlatte.kv_cache.lloyd_max import lloyd_max


def _byte_table(elements: tuple[float, ...], byte: int) -> list[str]:
    """One byte of each of eight fp16 values, as two words for prmt to select from."""
    chosen = [struct.pack("<e", number)[byte] for number in elements]
    return [f"0x{int.from_bytes(bytes(part), 'little'):08X}" for part in (chosen[:4], chosen[4:])]


def _kept_text(bits: int) -> str:
    """Load the first words of the tables of ``_centroids_text`` to registers that live for the whole kernel.

    prmt has one constant operand, and ptxas would rematerialize the other constant for each prmt. The words must
    therefore be opaque, and not uniform: the lane index is added if $1 is negative, which never happens.
    """
    elements = lloyd_max(bits)[-8:]
    words = {"low": _byte_table(elements, 0)[0], "high": _byte_table(elements, 1)[0], "sign": "0x01010101"}
    lines = [".reg .b32 tq_zero, tq_low, tq_high, tq_sign;", "mov.u32 tq_zero, %laneid;", "shr.s32 $0, $1, 31;"]
    lines += [
        "and.b32 tq_zero, tq_zero, $0;",
        *(f"add.u32 tq_{name}, tq_zero, {word};" for name, word in words.items()),
    ]
    return " ".join(lines)


def _centroids_text(bits: int) -> str:
    """Converts a word $12 of eight codes to eight fp16 centroids $0 to $7, and to four sums of two squares each, $8 to
    $11.

    prmt selects the lower and upper bytes of four values by the lower three bits of four nibbles. For 16 codes these
    bits select the magnitude at index i, for both code 8 + i and code 7 - i. A nibble of 8 to 15 makes prmt replicate
    the sign bit of the selected byte, which yields the value's sign.
    """
    elements = lloyd_max(bits)[-8:]
    low, high = _byte_table(elements, 0)[1], _byte_table(elements, 1)[1]
    lines = [".reg .b32 s, w, sel, l, h, p, q;"]
    if bits == 3:
        lines.append("mov.b32 sel, $12;")
    else:
        lines += ["mov.b32 w, $12; and.b32 s, w, 0x88888888; shr.u32 l, s, 3; sub.u32 s, s, l;"]
        lines.append("lop3.b32 sel, w, s, 0x77777777, 0x82;")
    for half in (0, 1):
        if half:
            lines += ["shr.u32 sel, sel, 16;", "" if bits == 3 else "shr.u32 w, w, 16;"]
        lines += [f"prmt.b32 l, tq_low, {low}, sel;", f"prmt.b32 h, tq_high, {high}, sel;"]
        if bits == 4:
            lines.append("prmt.b32 s, tq_sign, 0x01010101, w; shl.b32 s, s, 7; add.u32 h, h, s;")
        for pair, order in enumerate(("0x5140", "0x7362")):
            first = 4 * half + 2 * pair
            lines += [f"prmt.b32 p, l, h, {order};", f"mov.b32 {{${first}, ${first + 1}}}, p;"]
            lines.append("fma.rn.f16x2 q, p, p, q;" if pair else "mul.rn.f16x2 q, p, p;")
        lines.append(f"mov.b32 {{${8 + 2 * half}, ${9 + 2 * half}}}, q;")
    return "{" + " ".join(filter(None, lines)) + "}"


_KEPT_3, _KEPT_4 = tl.constexpr(_kept_text(3)), tl.constexpr(_kept_text(4))
_THREE_BITS, _FOUR_BITS = tl.constexpr(_centroids_text(3)), tl.constexpr(_centroids_text(4))
_E4M3 = tl.constexpr(
    """{
    .reg .b16 low, high;
    .reg .b32 p;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 p, low;
    mov.b32 {$0, $1}, p;
    cvt.rn.f16x2.e4m3x2 p, high;
    mov.b32 {$2, $3}, p;
    }"""
)


def _steps_text() -> str:
    """Converts two words of codes to eight pairs of fp16, each with an element of the first and of the second word:
    code · 2^-24 or 2^-20.

    In a subnormal fp16 the last bit is 2^-24; every second code is shifted by four bits.
    """
    lines = [".reg .b32 w;"]
    for half, order in enumerate(("0x5410", "0x7632")):
        lines.append(f"prmt.b32 w, $8, $9, {order};")
        for position in range(4):
            if position == 2:
                lines.append("shr.u32 w, w, 8;")
            lines.append(f"and.b32 ${4 * half + position}, w, {('0x000F000F', '0x00F000F0')[position % 2]};")
    return "{" + " ".join(lines) + "}"


_STEPS = tl.constexpr(_steps_text())


@triton.jit
def _join8(x):
    """Join eight tensors [rows, words] to [rows, words, 2, 2, 2], indexed in binary from the last axis."""
    return tl.join(
        tl.join(tl.join(x[0], x[1]), tl.join(x[2], x[3])),
        tl.join(tl.join(x[4], x[5]), tl.join(x[6], x[7])),
    )


@triton.jit
def spread(groups):
    """Expand eight codes of 3 bits (24 bits) to the nibbles of a word."""
    t = (groups & 0xFFF) | ((groups & 0xFFF000) << 4)
    t = (t & 0x003F003F) | ((t & 0x0FC00FC0) << 2)
    return (t & 0x07070707) | ((t & 0x38383838) << 1)


@triton.jit
def keep_tables(count, BITS: tl.constexpr):
    """Load the tables of ``key_operand``; must be called once in a kernel, before the first ``key_operand``. ``count``
    is a non-negative int32 argument of the kernel."""
    TEXT: tl.constexpr = _KEPT_4 if BITS == 4 else _KEPT_3
    tl.inline_asm_elementwise(TEXT, "=r,r", [count], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def key_operand(words, BITS: tl.constexpr):
    """fp16 [keys, D], centroids for N(0, 1) from words [keys, D / 8] of codes, and [keys, D / 2], sums of two squares.

    ``key_dims`` has the order of dims.
    """
    KEYS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    x = tl.inline_asm_elementwise(
        _FOUR_BITS if BITS == 4 else _THREE_BITS,
        "=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,r",
        [words],
        dtype=(tl.float16,) * 12,
        is_pure=True,
        pack=1,
    )
    # Four adjacent elements, and four at an offset of 16.
    elements = tl.reshape(_join8(x), [KEYS, WORDS // 4, 4, 2, 2, 2])
    elements = tl.reshape(tl.permute(elements, (0, 1, 5, 2, 4, 3)), [KEYS, WORDS * 8])
    squares = tl.permute(tl.join(tl.join(x[8], x[9]), tl.join(x[10], x[11])), (0, 1, 3, 2))
    return elements, tl.reshape(squares, [KEYS, WORDS * 4])


@triton.jit
def e4m3_operand(words):
    """fp16 [keys, D] of words [keys, D / 4] of e4m3, with dims in order."""
    KEYS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    x = tl.inline_asm_elementwise(_E4M3, "=h,=h,=h,=h,r", [words], dtype=(tl.float16,) * 4, is_pure=True, pack=1)
    # [keys, words, 2, 2]: the index among 4 adjacent elements of a thread
    elements = tl.permute(tl.join(tl.join(x[0], x[1]), tl.join(x[2], x[3])), (0, 1, 3, 2))
    return tl.reshape(elements, [KEYS, WORDS * 4])


@triton.jit
def key_dims(D: tl.constexpr, BITS: tl.constexpr):
    """The dim at each index of ``key_operand`` [D]."""
    position = tl.arange(0, D)
    if BITS == 8:
        return position
    else:
        return position // 32 * 32 + position // 4 % 4 * 8 + position // 16 % 2 * 4 + position % 4


@triton.jit
def value_operand(words):
    """fp16 [keys, D] of words [keys, D / 8] of codes, each divided by the ``value_unit`` of its index.

    In the operand's layout a thread holds pairs of adjacent keys, of every eighth dim.
    """
    KEYS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    x = tl.inline_asm_elementwise(
        _STEPS, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words], dtype=(tl.float16,) * 8, is_pure=True, pack=2
    )
    ordered = tl.permute(tl.reshape(_join8(x), [KEYS, WORDS // 8, 8, 2, 2, 2]), (0, 1, 5, 4, 3, 2))
    return tl.reshape(ordered, [KEYS, WORDS * 8])


@triton.jit
def value_dims(D: tl.constexpr, FIRST: tl.constexpr):
    """The dim at each index of ``value_operand`` [D], if the first word begins with dim FIRST."""
    position = tl.arange(0, D)
    return (position // 64 * 64 + position % 8 * 8 + position // 8 % 8 + FIRST) % D


@triton.jit
def value_unit(dims):
    """The factor, float32, that scales ``value_operand``'s elements to codes, for each dim."""
    return tl.where(dims % 2 == 0, 2.0**24, 2.0**20)
