"""``index_weights`` in Triton: a program computes the dot products of some rows with some heads on CUDA cores.

A program processes the whole width, so no reduction over programs is needed. There are too few rows and heads to fill
tensor cores, and float32 would need three 16-bit MMAs.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import alignment_elements, cdiv
from flashlatte.kernels.triton.fp8 import to_float32
from flashlatte.kernels.triton.rows import TokenRows, token_row, token_rows
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel


class WeightsBlock(NamedTuple):
    """The tile of a program: rows, heads, and elements of each per step."""

    rows: int
    heads: int
    width: int


# With few rows most SMs would be idle, so a program processes few heads. (maximum rows, block); the first that fits.
BLOCKS = ((4, WeightsBlock(4, 1, 1024)), (16, WeightsBlock(8, 2, 1024)), (None, WeightsBlock(8, 4, 512)))
WARPS, STAGES = 8, 3


def index_weights(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    tokens, width = hidden.shape
    heads = weight.shape[0]
    block = next(block for most, block in BLOCKS if most is None or tokens <= most)
    rows, of_heads = (token_rows(x, align=_alignment(x, width)) for x in (hidden, weight))
    align = max(rows.align, of_heads.align)
    index_weights_kernel[(cdiv(tokens, block.rows), cdiv(heads, block.heads))](
        rows,
        of_heads,
        out=out,
        tokens=tokens,
        heads=heads,
        units=width // align,
        BLOCK_T=block.rows,
        BLOCK_H=block.heads,
        BLOCK_K=block.width,
        ALIGN=align,
        STAGES=STAGES,
        num_warps=WARPS,
    )


def _alignment(x: torch.Tensor, width: int) -> int:
    """The alignment of x's rows in elements, which divides their width too."""
    return alignment_elements(x, stride_in_use(x, 0), width)


@kernel
def index_weights_kernel(
    hidden: TokenRows,
    weight: TokenRows,
    out,
    tokens: tl.int32,
    heads: tl.int32,
    units: tl.int32,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute BLOCK_T rows of BLOCK_H heads, whose width is ``units`` · ALIGN elements."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    rows, of_heads = token_row(hidden, token)[:, None], token_row(weight, head)[:, None]
    in_tokens, in_heads = (token < tokens)[:, None], (head < heads)[:, None]
    sums = tl.zeros([BLOCK_T, BLOCK_H, BLOCK_K], tl.float32)
    for begin in tl.range(0, units * ALIGN, BLOCK_K, num_stages=STAGES):
        column = begin + tl.arange(0, BLOCK_K)[None, :]
        inside = column < units * ALIGN
        x = to_float32(tl.load(rows + column, mask=in_tokens & inside, other=0.0))
        w = tl.load(of_heads + column, mask=in_heads & inside, other=0.0)
        sums += x[:, None, :] * w[None, :, :]
    target = out + token.to(tl.int64)[:, None] * heads + head[None, :]
    tl.store(target, tl.sum(sums, axis=2), mask=in_tokens & (head < heads)[None, :])
