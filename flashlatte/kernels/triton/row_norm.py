"""RMSNorm of rows (arXiv:1910.07467) in Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import cast, from_float32, to_float32
from flashlatte.kernels.triton.rows import token_row, token_rows
from flashlatte.runtime.kernel_records import Constant, Float32, Int64, Pointer


class RowNorm(NamedTuple):
    """A norm of the first ``width`` elements of rows: the fields of their ``TokenRows``, the weight [width] and the
    contiguous result. Or nothing."""

    start: Pointer
    stride: Int64
    align: Constant
    weight: Pointer
    out: Pointer
    eps: Float32
    width: Constant


def row_norm(
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    out: torch.Tensor | None,
    eps: float,
    align: int | None = None,
) -> RowNorm:
    return RowNorm(*token_rows(x, align), weight, out, eps, 0 if weight is None else weight.shape[0])


@triton.jit
def store_norm(norm, token, out_row, slot_row, in_cache):
    """Write the norm of a token's row to ``out_row`` and, where ``in_cache``, as rounded there, to ``slot_row``."""
    column = tl.arange(0, triton.next_power_of_2(norm.width))
    inside = column < norm.width
    x = to_float32(tl.load(token_row(norm, token) + column, mask=inside, other=0.0))
    gain = to_float32(tl.load(norm.weight + column, mask=inside, other=0.0))
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / norm.width + norm.eps) * gain
    rounded = from_float32(x, out_row.dtype.element_ty)
    tl.store(out_row + column, rounded, mask=inside)
    if slot_row is not None:
        stored = cast(rounded, slot_row.dtype.element_ty)
        tl.store(slot_row + column, stored, mask=inside & in_cache)
