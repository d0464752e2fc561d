"""A tile of index logits: loading of queries and keys as MMA operands, and the sum over heads.

The MMA is keys times queries, [BLOCK_N, queries · heads], so a thread sums over heads in its registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.fp4 import e2m1_to_float
from flashlatte.kernels.triton.fp8 import converts_e4m3, e4m3_to_float, e8m0_to_float, to_float32
from flashlatte.runtime import machine


class Operand(NamedTuple):
    """An MMA operand [rows, D]; for e2m1 keys, two operands with the even and the odd columns."""

    even: Any
    odd: Any


def compute_type(q: torch.Tensor, encoding: str) -> str:
    """The dtype of the MMA: "e4m3" if the GPU supports it, else "bf16", or "fp32"."""
    if machine.interpreting() or encoding == "fp32":
        return "fp32"
    both_e4m3 = q.dtype == torch.float8_e4m3fn and encoding == "e4m3"
    return "e4m3" if both_e4m3 and converts_e4m3(q.device) else "bf16"


@triton.jit
def as_operand(x, COMPUTE: tl.constexpr, NATIVE: tl.constexpr):
    """Cast loaded values to the dtype of the MMA, exactly; uint8 values are e4m3 bits."""
    if x.dtype == tl.uint8:
        if COMPUTE == "e4m3":
            return x.to(tl.float8e4nv, bitcast=True)
        else:
            y = e4m3_to_float(x, NATIVE)
            return y if COMPUTE == "fp32" else y.to(tl.bfloat16)
    else:
        return to_float32(x, True) if COMPUTE == "fp32" and x.dtype != tl.float32 else x


@triton.jit
def load_queries(
    q,
    weights,
    query,
    head,
    inside,
    q_stride,
    q_head_stride,
    weight_stride,
    D: tl.constexpr,
    ENCODING: tl.constexpr,
    COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Load rows (query, head) as an operand, and half of their weights; zeros where not ``inside``.

    q's strides are in units of ALIGN elements, which gives Triton the alignment of rows.
    """
    row = (q + (query.to(tl.int64) * q_stride + head * q_head_stride) * ALIGN)[:, None]
    mask = inside[:, None]
    if ENCODING == "e2m1":
        column = 2 * tl.arange(0, D // 2)[None, :]
        even = as_operand(tl.load(row + column, mask=mask, other=0), COMPUTE, NATIVE)
        odd = as_operand(tl.load(row + column + 1, mask=mask, other=0), COMPUTE, NATIVE)
    else:
        even = as_operand(tl.load(row + tl.arange(0, D)[None, :], mask=mask, other=0), COMPUTE, NATIVE)
        odd = even
    weight = tl.load(weights + query.to(tl.int64) * weight_stride + head, mask=inside, other=0.0)
    return Operand(even, odd), weight * 0.5


@triton.jit
def load_keys(
    values,
    scales,
    inside,
    D: tl.constexpr,
    ENCODING: tl.constexpr,
    COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Load the keys at addresses ``values`` (e2m1: with E8M0 bytes at ``scales``); zeros where not ``inside``."""
    mask = inside[:, None]
    if ENCODING == "e2m1":
        byte = tl.arange(0, D // 2)[None, :]
        packed = tl.load(values[:, None] + byte, mask=mask, other=0).to(tl.int32)
        scale = e8m0_to_float(tl.load(scales[:, None] + byte // 16, mask=mask, other=0))
        even, odd = e2m1_to_float(packed & 0xF) * scale, e2m1_to_float(packed >> 4) * scale
        if COMPUTE == "bf16":
            even, odd = even.to(tl.bfloat16), odd.to(tl.bfloat16)
    else:
        even = as_operand(tl.load(values[:, None] + tl.arange(0, D)[None, :], mask=mask, other=0), COMPUTE, NATIVE)
        odd = even
    return Operand(even, odd)


@triton.jit
def head_sums(keys, queries, half_weights, QUERIES: tl.constexpr, ENCODING: tl.constexpr, COMPUTE: tl.constexpr):
    """Σ_h weight · relu(q · k): [BLOCK_N, QUERIES]."""
    PRECISION: tl.constexpr = "ieee" if COMPUTE == "fp32" else "tf32"
    products = tl.dot(keys.even, tl.trans(queries.even), input_precision=PRECISION)
    if ENCODING == "e2m1":
        products = tl.dot(keys.odd, tl.trans(queries.odd), products, input_precision=PRECISION)
    # 2 · relu(x) as x + |x|: GPUs compute a maximum at half the rate of an addition, and this propagates NaN.
    weighted = (products + tl.abs(products)) * half_weights[None, :]
    if QUERIES == 1:
        return tl.sum(weighted, axis=1)[:, None]
    else:
        HEADS: tl.constexpr = weighted.shape[1] // QUERIES
        return tl.sum(tl.reshape(weighted, [weighted.shape[0], QUERIES, HEADS]), axis=2)
