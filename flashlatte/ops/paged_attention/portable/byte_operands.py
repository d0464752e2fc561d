"""Conversion of one-byte elements to tensor-core operands in registers: a thread unpacks the words that it loaded.

An MMA may sum over a key's dims in any order if the query has the same order, and a value's dims may be output in any
order. So elements stay in the thread that loaded their word, at the operand position that this thread holds, and none
go through shared memory. ``key_dims`` and ``value_operand`` define the order of dims.

Triton propagates an operand's layout back to the loads if there are only loads, constants, arithmetic and views in
between. Along the summed axis, each of 4 threads holds every fourth group of 4 elements; along the other axis, each of
8 threads holds every eighth element.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import e4m3_to_float
from flashlatte.ops.paged_attention.portable.keys import E4M3, E5M2, INT8
from flashlatte.runtime.triton_kernel import INTERPRETED

# Converts four bytes x to two interleaved pairs y of fp16. e5m2 is the upper half of fp16; int8 + 128 becomes the
# lowest bits of 1024.
_TO_HALVES = {
    E4M3: ("mov.b32 {low, high}, x; cvt.rn.f16x2.e4m3x2 y, low;", "cvt.rn.f16x2.e4m3x2 y, high;"),
    E5M2: ("prmt.b32 y, x, 0, 0x1404;", "prmt.b32 y, x, 0, 0x3424;"),
    INT8: (
        "xor.b32 x, x, 0x80808080; mov.b32 t, 0x64806480; prmt.b32 y, x, 0x64, 0x4140; sub.f16x2 y, y, t;",
        "prmt.b32 y, x, 0x64, 0x4342; sub.f16x2 y, y, t;",
    ),
}
_REGISTERS = ".reg .b32 x, y, t; .reg .b16 low, high;"


def _word_text(kind: int) -> str:
    """PTX that converts a word to its four elements in fp16."""
    first, second = _TO_HALVES[kind]
    return f"{{ {_REGISTERS} mov.b32 x, $4; {first} mov.b32 {{$0, $1}}, y; {second} mov.b32 {{$2, $3}}, y; }}"


def _two_words_text(kind: int) -> str:
    """PTX that converts two words to four pairs of fp16: element i of the first and element i of the second."""
    first, second = _TO_HALVES[kind]
    return (
        f"{{ {_REGISTERS} prmt.b32 x, $4, $5, 0x5140; {first} mov.b32 $0, y; {second} mov.b32 $1, y; "
        f"prmt.b32 x, $4, $5, 0x7362; {first} mov.b32 $2, y; {second} mov.b32 $3, y; }}"
    )


_WORD = tl.constexpr(tuple(_word_text(kind) for kind in (E4M3, E5M2, INT8)))
_TWO_WORDS = tl.constexpr(tuple(_two_words_text(kind) for kind in (E4M3, E5M2, INT8)))


@triton.jit
def _byte(words, BYTE: tl.constexpr, form: tl.constexpr):
    """One byte of each word as fp16, or as float32 in the interpreter."""
    byte = (words >> (8 * BYTE)) & 0xFF
    if form.kind == 1:
        x = e4m3_to_float(byte.to(tl.uint8), form.native)
    elif form.kind == 2:
        x = (byte.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = byte.to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32)
    return x if INTERPRETED else x.to(tl.float16)


@triton.jit
def _elements(words, TEXT: tl.constexpr, WORDS: tl.constexpr, form: tl.constexpr):
    """The four elements of each word, [rows, words, 2, 2], indexed by the low and then the high bit of the element's
    index."""
    if form.ptx:
        CODE: tl.constexpr = TEXT[form.kind - 1]
        if WORDS == 1:
            x = tl.inline_asm_elementwise(CODE, "=h,=h,=h,=h,r", [words], dtype=(tl.float16,) * 4, is_pure=True, pack=1)
        else:
            x = tl.inline_asm_elementwise(
                CODE, "=r,=r,=r,=r,r,r", [words], dtype=(tl.float16,) * 4, is_pure=True, pack=2
            )
        return tl.join(tl.join(x[0], x[1]), tl.join(x[2], x[3]))
    else:
        return tl.join(
            tl.join(_byte(words, 0, form), _byte(words, 1, form)),
            tl.join(_byte(words, 2, form), _byte(words, 3, form)),
        )


@triton.jit
def key_operand(words, form: tl.constexpr):
    """[heads, keys, D] of words [heads, keys, D / 4], with dims in the order of ``key_dims``."""
    HEADS: tl.constexpr = words.shape[0]
    KEYS: tl.constexpr = words.shape[1]
    WORDS: tl.constexpr = words.shape[2]
    elements = tl.reshape(_elements(words, _WORD, 1, form), [HEADS, KEYS, 4, WORDS // 4, 2, 2])
    return tl.reshape(tl.permute(elements, (0, 1, 3, 2, 5, 4)), [HEADS, KEYS, WORDS * 4])


@triton.jit
def key_dims(D: tl.constexpr):
    """The dim at each index of ``key_operand`` [D]: each of 4 threads has a contiguous fourth of a row."""
    index = tl.arange(0, D)
    return index // 4 % 4 * (D // 4) + index // 16 * 4 + index % 4


@triton.jit
def value_operand(words, form: tl.constexpr):
    """[heads, D, keys] of words [heads, keys, D / 4]. Index p has dim p % 8 · D / 8 + p // 8: each of 8 threads has a
    contiguous eighth of a row."""
    HEADS: tl.constexpr = words.shape[0]
    KEYS: tl.constexpr = words.shape[1]
    WORDS: tl.constexpr = words.shape[2]
    elements = tl.reshape(_elements(words, _TWO_WORDS, 2, form), [HEADS, KEYS, 8, WORDS // 8, 2, 2])
    return tl.reshape(tl.permute(elements, (0, 3, 5, 4, 2, 1)), [HEADS, WORDS * 4, KEYS])
