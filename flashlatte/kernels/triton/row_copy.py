"""Copies of the bytes of rows, whatever their dtype: by words of 4 bytes if the alignment allows it, of 1 byte
otherwise."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import alignment_bytes, cdiv
from flashlatte.runtime.strides import stride_in_use

BLOCK_BYTES = 256
NUM_WARPS = 4


class RowCopy(NamedTuple):
    """How a kernel copies rows, as its constexpr.

    Attributes:
        unit: bytes, up to 16, that divide every address, stride and width; strides and widths are passed in this unit.
        width: width of a row, in units.
        word: bytes of a word.
        block_rows, block_words: shape of a program's tile.
    """

    unit: int
    width: int
    word: int
    block_rows: int
    block_words: int

    def grid(self, num_rows: int) -> tuple[int]:
        return (cdiv(num_rows, self.block_rows) * cdiv(self.width * self.unit // self.word, self.block_words),)


def row_copy(width: int, block_rows: int, *tensors: torch.Tensor, divisible: int = 0) -> RowCopy:
    """The copy of rows of ``width`` bytes between tensors, whose last axis is contiguous.

    ``divisible``: a number of bytes that must be a multiple of the unit too.
    """
    strides = [
        stride_in_use(tensor, axis) * tensor.element_size() for tensor in tensors for axis in range(tensor.dim() - 1)
    ]
    unit = math.gcd(*map(alignment_bytes, tensors), *strides, width, divisible)
    word = word_bytes(unit)
    return RowCopy(unit, width // unit, word, block_rows, BLOCK_BYTES // word)


def word_bytes(unit: int) -> int:
    """The bytes of the words of ``words_at``."""
    return 4 if unit >= 4 else 1


def strides_in_units(copy: RowCopy, tensor: torch.Tensor) -> list[int]:
    """The strides of all axes except the last, in units."""
    return [stride_in_use(tensor, axis) * tensor.element_size() // copy.unit for axis in range(tensor.dim() - 1)]


@triton.jit
def tile_of_words(COPY: tl.constexpr):
    """The first row (int64) and the words [1, block_words] of a program, and which of the words are in rows."""
    words: tl.constexpr = COPY.width * (COPY.unit // COPY.word)
    column_blocks: tl.constexpr = (words + COPY.block_words - 1) // COPY.block_words
    program = tl.program_id(0)
    first_row = (program // column_blocks).to(tl.int64) * COPY.block_rows
    word = (program % column_blocks) * COPY.block_words + tl.arange(0, COPY.block_words)[None, :]
    return first_row, word, word < words


@triton.jit
def words_at(memory, offset, UNIT: tl.constexpr):
    """Pointers to the words ``offset`` units of UNIT bytes after ``memory``."""
    WORD: tl.constexpr = tl.uint32 if UNIT >= 4 else tl.uint8
    return memory.to(tl.pointer_type(WORD)) + offset * (UNIT // 4 if UNIT >= 4 else UNIT)
