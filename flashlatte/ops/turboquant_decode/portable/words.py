"""Codes of a cache to operands of tensor cores, in registers: a few instructions of PTX for a word of eight codes.

A product sums over a key's dims in any order, as long as the query has them in the same; and a value's dims may come
out in any order. So a thread unpacks whole words, into the places of an operand that tensor cores want it to hold
(``key_operand``, ``value_operand``), and no number goes through shared memory. ``key_dims`` and ``value_dims`` say
which dim stands where.

Triton gives the layout of an operand to the loads that it comes from if there are but loads, constants, arithmetic
and views on the way. Of a product's sides of 16-bit numbers a thread of 4 holds each fourth group of 4 of those that
are summed over, and of 8 each eighth of the others.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import struct

import triton
import triton.language as tl

from flashlatte.kv_cache.lloyd_max import lloyd_max


def _byte_table(numbers: tuple[float, ...], byte: int) -> list[str]:
    """One byte of each of eight fp16 numbers, as two words that prmt selects from."""
    chosen = [struct.pack("<e", number)[byte] for number in numbers]
    return [f"0x{int.from_bytes(bytes(part), 'little'):08X}" for part in (chosen[:4], chosen[4:])]


def _centroids_text(numbers: tuple[float, ...], before: str, signs: tuple[str, str] | None) -> str:
    """A word of codes to eight fp16 numbers: prmt finds their lower and upper bytes by four codes at a time.

    ``before`` makes ``sel``, whose lower three bits of each nibble choose one of ``numbers``; ``signs`` are added to
    the upper bytes.
    """
    low, high = ", ".join(_byte_table(numbers, 0)), ", ".join(_byte_table(numbers, 1))
    lines = [".reg .b32 s, t, sel, l, h, p;", before]
    for half in (0, 1):
        if half:
            lines.append("shr.u32 sel, sel, 16;")
        lines += [f"prmt.b32 l, {low}, sel;", f"prmt.b32 h, {high}, sel;", "" if signs is None else signs[half]]
        for pair, order in enumerate(("0x5140", "0x7362")):
            first = 4 * half + 2 * pair
            lines += [f"prmt.b32 p, l, h, {order};", f"mov.b32 {{${first}, ${first + 1}}}, p;"]
    return "{" + " ".join(lines) + "}"


# Of 8 codes from 0 to 7 the numbers themselves are looked up.
_THREE_BITS = tl.constexpr(_centroids_text(lloyd_max(3), "and.b32 sel, $8, 0x77777777;", None))
# Of 16 the magnitude is: of code 8 + i that of place i, of code 7 - i too. prmt with a nibble of 8 to 15 repeats the
# sign of the byte 0x80 that it chooses, and gives 0xFF instead of 0x80: its last bit becomes the sign.
_SIGN = "prmt.b32 {0}, 0x80808080, 0x80808080, {0}; shl.b32 {0}, {0}, 7; lop3.b32 h, h, {0}, 0x80808080, 0x78;"
_FOUR_BITS = tl.constexpr(
    _centroids_text(
        lloyd_max(4)[8:],
        "and.b32 s, $8, 0x88888888; shr.u32 t, s, 3; sub.u32 t, s, t; lop3.b32 sel, $8, t, 0x77777777, 0x82; "
        "not.b32 s, s; shr.u32 t, s, 16;",
        (_SIGN.format("s"), _SIGN.format("t")),
    )
)
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


def _steps_text(centre: int) -> str:
    """Two words of codes to eight pairs of bf16, the first number of each of the first word: code - centre, exactly.

    0x4300 is 128, and its last bits are worth 1.
    """
    offset = f"{0xC300 + centre:04X}"
    lines = [f".reg .b32 w, t, one, offset; mov.b32 one, 0x3F803F80; mov.b32 offset, 0x{offset}{offset};"]
    for half, order in enumerate(("0x5410", "0x7632")):
        lines.append(f"prmt.b32 w, $8, $9, {order};")
        for place in range(4):
            lines += [f"shr.u32 t, w, {4 * place};", f"lop3.b32 ${4 * half + place}, t, 0x000F000F, 0x43004300, 0xEA;"]
    lines += [f"fma.rn.bf16x2 ${number}, ${number}, one, offset;" for number in range(8)]
    return "{" + " ".join(lines) + "}"


_STEPS_FROM_4 = tl.constexpr(_steps_text(4))
_STEPS_FROM_8 = tl.constexpr(_steps_text(8))


@triton.jit
def _join8(x):
    """[rows, words, 2, 2, 2] of eight tensors [rows, words], whose numbers count in binary from the last axis back."""
    return tl.join(
        tl.join(tl.join(x[0], x[1]), tl.join(x[2], x[3])),
        tl.join(tl.join(x[4], x[5]), tl.join(x[6], x[7])),
    )


@triton.jit
def spread(groups):
    """Eight codes of 3 bits each, 24 bits, to the nibbles of a word."""
    t = (groups & 0xFFF) | ((groups & 0xFFF000) << 4)
    t = (t & 0x003F003F) | ((t & 0x0FC00FC0) << 2)
    return (t & 0x07070707) | ((t & 0x38383838) << 1)


@triton.jit
def key_operand(words, BITS: tl.constexpr):
    """fp16 [D, keys] of words [D / 8, keys] of codes (BITS 3 or 4), or [D / 4, keys] of e4m3.

    Of codes these are the centroids for N(0, 1). ``key_dims`` has the order of dims.
    """
    WORDS: tl.constexpr = words.shape[0]
    KEYS: tl.constexpr = words.shape[1]
    if BITS == 8:
        x = tl.inline_asm_elementwise(_E4M3, "=h,=h,=h,=h,r", [words], dtype=(tl.float16,) * 4, is_pure=True, pack=1)
        # [words, keys, 2, 2]: a number's place is one of 4 neighbours in a thread
        numbers = tl.permute(tl.join(tl.join(x[0], x[1]), tl.join(x[2], x[3])), (0, 3, 2, 1))
        return tl.reshape(numbers, [WORDS * 4, KEYS])
    else:
        x = tl.inline_asm_elementwise(
            _FOUR_BITS if BITS == 4 else _THREE_BITS,
            "=h,=h,=h,=h,=h,=h,=h,=h,r",
            [words],
            dtype=(tl.float16,) * 8,
            is_pure=True,
            pack=1,
        )
        # Four neighbours, and four others 16 places on.
        numbers = tl.reshape(_join8(x), [WORDS // 4, 4, KEYS, 2, 2, 2])
        return tl.reshape(tl.permute(numbers, (0, 5, 1, 4, 3, 2)), [WORDS * 8, KEYS])


@triton.jit
def key_dims(D: tl.constexpr, BITS: tl.constexpr):
    """The dim in each place of ``key_operand`` [D]."""
    place = tl.arange(0, D)
    if BITS == 8:
        return place
    else:
        return place // 32 * 32 + place // 4 % 4 * 8 + place // 16 % 2 * 4 + place % 4


@triton.jit
def value_operand(words, BITS: tl.constexpr):
    """bf16 [keys, D] of words [keys, D / 8] of codes: code - 2^(BITS - 1).

    Tensor cores want a thread to hold two neighbouring keys side by side, of every eighth dim.
    """
    KEYS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    x = tl.inline_asm_elementwise(
        _STEPS_FROM_8 if BITS == 4 else _STEPS_FROM_4,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
        [words],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )
    ordered = tl.permute(tl.reshape(_join8(x), [KEYS, WORDS // 8, 8, 2, 2, 2]), (0, 1, 5, 4, 3, 2))
    return tl.reshape(ordered, [KEYS, WORDS * 8])


@triton.jit
def value_dims(D: tl.constexpr, FIRST: tl.constexpr):
    """The dim in each place of ``value_operand`` [D], where the first word begins with dim FIRST."""
    place = tl.arange(0, D)
    return (place // 64 * 64 + place % 8 * 8 + place // 8 % 8 + FIRST) % D
