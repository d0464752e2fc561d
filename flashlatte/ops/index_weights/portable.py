"""``index_weights`` in Triton: a program adds up the products of some rows with some heads, in registers.

The whole width is one program's, so that nothing is added up between programs. Rows and heads are so few that tensor
cores would not be filled, and float32 would be three products of 16 bits on them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import blocks, unit_elements
from flashlatte.kernels.triton.fp8 import to_float32
from flashlatte.runtime import machine
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel


class WeightsBlock(NamedTuple):
    """What a program takes: rows, heads, numbers of each at a time; its warps."""

    rows: int
    heads: int
    width: int
    warps: int


# Few rows leave most SMs idle: each program takes few heads. The first whose ``most`` rows are enough.
BLOCKS = ((4, WeightsBlock(4, 1, 1024, 8)), (16, WeightsBlock(8, 2, 1024, 8)), (None, WeightsBlock(8, 4, 512, 8)))
STAGES = 3


def index_weights(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    tokens, width = hidden.shape
    heads = weight.shape[0]
    block = next(block for most, block in BLOCKS if most is None or tokens <= most)
    hidden_unit, weight_unit = _unit(hidden, width), _unit(weight, width)
    unit = max(hidden_unit, weight_unit)
    index_weights_kernel[(blocks(tokens, block.rows), blocks(heads, block.heads))](
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
        UNIT=unit,
        HIDDEN_UNIT=hidden_unit,
        WEIGHT_UNIT=weight_unit,
        STAGES=STAGES,
        INTERPRETED=machine.interpreting(),
        num_warps=block.warps,
    )


def _unit(x: torch.Tensor, width: int) -> int:
    """The elements, as many as 16 bytes hold at most, at multiples of which rows of x begin and end."""
    return unit_elements(x, stride_in_use(x, 0), width)


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
    UNIT: tl.constexpr,
    HIDDEN_UNIT: tl.constexpr,
    WEIGHT_UNIT: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """BLOCK_T rows with BLOCK_H heads. Strides, and the rows' width, count units of so many elements."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    rows = hidden + (token.to(tl.int64) * hidden_stride)[:, None] * HIDDEN_UNIT
    of_heads = weight + (head.to(tl.int64) * weight_stride)[:, None] * WEIGHT_UNIT
    there, of_layer = (token < tokens)[:, None], (head < heads)[:, None]
    sums = tl.zeros([BLOCK_T, BLOCK_H, BLOCK_K], tl.float32)
    for begin in tl.range(0, units * UNIT, BLOCK_K, num_stages=STAGES):
        column = begin + tl.arange(0, BLOCK_K)[None, :]
        inside = column < units * UNIT
        x = to_float32(tl.load(rows + column, mask=there & inside, other=0.0), INTERPRETED)
        w = tl.load(of_heads + column, mask=of_layer & inside, other=0.0)
        sums += x[:, None, :] * w[None, :, :]
    place = out + token.to(tl.int64)[:, None] * heads + head[None, :]
    tl.store(place, tl.sum(sums, axis=2), mask=there & (head < heads)[None, :])
