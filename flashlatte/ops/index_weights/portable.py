"""``index_weights`` in Triton: a program computes the dot products of some rows with some heads on CUDA cores.

A program processes the whole width, so no reduction over programs is needed. There are too few rows and heads to fill
tensor cores, and float32 would need three 16-bit MMAs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import alignment_elements, cdiv
from flashlatte.kernels.triton.fp8 import to_float32
from flashlatte.runtime import machine
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel


class WeightsBlock(NamedTuple):
    """The tile of a program: rows, heads, and elements of each per step; and its warps."""

    rows: int
    heads: int
    width: int
    warps: int


# With few rows most SMs would be idle, so a program processes few heads. (maximum rows, block); the first that fits.
BLOCKS = ((4, WeightsBlock(4, 1, 1024, 8)), (16, WeightsBlock(8, 2, 1024, 8)), (None, WeightsBlock(8, 4, 512, 8)))
STAGES = 3


def index_weights(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    tokens, width = hidden.shape
    heads = weight.shape[0]
    block = next(block for most, block in BLOCKS if most is None or tokens <= most)
    hidden_unit, weight_unit = _unit(hidden, width), _unit(weight, width)
    unit = max(hidden_unit, weight_unit)
    index_weights_kernel[(cdiv(tokens, block.rows), cdiv(heads, block.heads))](
        hidden=hidden,
        weight=weight,
        out=out,
        tokens=tokens,
        heads=heads,
        units=width // unit,
        hidden_stride=stride_in_use(hidden, 0) // hidden_unit,
        weight_stride=stride_in_use(weight, 0) // weight_unit,
        BLOCK_T=block.rows,
        BLOCK_H=block.heads,
        BLOCK_K=block.width,
        ALIGN=unit,
        HIDDEN_ALIGN=hidden_unit,
        WEIGHT_ALIGN=weight_unit,
        STAGES=STAGES,
        INTERPRETED=machine.interpreting(),
        num_warps=block.warps,
    )


def _unit(x: torch.Tensor, width: int) -> int:
    """The largest number of elements, up to 16 bytes, of which the address, stride and width of x's rows are
    multiples."""
    return alignment_elements(x, stride_in_use(x, 0), width)


@kernel
def index_weights_kernel(
    hidden,
    weight,
    out,
    tokens: tl.int32,
    heads: tl.int32,
    units: tl.int32,
    hidden_stride: tl.int64,
    weight_stride: tl.int64,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr,
    HIDDEN_ALIGN: tl.constexpr,
    WEIGHT_ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute BLOCK_T rows of BLOCK_H heads. Strides and the rows' width are in units of that many elements."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    rows = hidden + (token.to(tl.int64) * hidden_stride)[:, None] * HIDDEN_ALIGN
    of_heads = weight + (head.to(tl.int64) * weight_stride)[:, None] * WEIGHT_ALIGN
    there, of_layer = (token < tokens)[:, None], (head < heads)[:, None]
    sums = tl.zeros([BLOCK_T, BLOCK_H, BLOCK_K], tl.float32)
    for begin in tl.range(0, units * ALIGN, BLOCK_K, num_stages=STAGES):
        column = begin + tl.arange(0, BLOCK_K)[None, :]
        inside = column < units * ALIGN
        x = to_float32(tl.load(rows + column, mask=there & inside, other=0.0), INTERPRETED)
        w = tl.load(of_heads + column, mask=of_layer & inside, other=0.0)
        sums += x[:, None, :] * w[None, :, :]
    place = out + token.to(tl.int64)[:, None] * heads + head[None, :]
    tl.store(place, tl.sum(sums, axis=2), mask=there & (head < heads)[None, :])
