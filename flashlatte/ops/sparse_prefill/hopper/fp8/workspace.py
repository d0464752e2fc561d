"""Quantize kv to e4m3 with one power-of-two scale. The scale stays on the device."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.row_scales import power_of_two_scale
from flashlatte.kernels.triton.rows import TokenRows, token_rows
from flashlatte.runtime import machine
from flashlatte.runtime.triton_kernel import kernel

# Rows that a program loads at a time.
_ROWS = 8
_PROGRAMS_PER_SM = 4
# Maximum number of programs that compute maxima; a power of two.
_MAXIMA = 1024


class Fp8Keys(NamedTuple):
    """Quantized rows, e4m3 [s_kv, d], and their scale, float32 [1]."""

    rows: torch.Tensor
    scale: torch.Tensor


def quantize_keys(kv: torch.Tensor) -> Fp8Keys:
    """Quantize ``kv`` [s_kv, 1, d], d 512 or 576, as ``fp8_attention.quantize_keys`` does."""
    s_kv, _, head_dim = kv.shape
    rows = torch.empty(s_kv, head_dim, dtype=torch.float8_e4m3fn, device=kv.device)
    scale = torch.empty(1, dtype=torch.float32, device=kv.device)
    maxima = torch.empty(_MAXIMA, dtype=torch.float32, device=kv.device)
    programs = min(-(-s_kv // _ROWS), _PROGRAMS_PER_SM * machine.num_sms(kv.device), _MAXIMA)
    source, rope = token_rows(kv[:, 0]), head_dim - 512
    maxima_kernel[(programs,)](source, maxima=maxima, s_kv=s_kv, ROPE=rope, ROWS=_ROWS, num_warps=4)
    quantize_kernel[(programs,)](
        source,
        rows=rows,
        maxima=maxima,
        scale=scale,
        programs=programs,
        s_kv=s_kv,
        ROPE=rope,
        ROWS=_ROWS,
        MAXIMA=_MAXIMA,
        num_warps=4,
    )
    return Fp8Keys(rows, scale)


@triton.jit
def _load(source, row, inside, FIRST_COL: tl.constexpr, COLS: tl.constexpr):
    col = FIRST_COL + tl.arange(0, COLS)
    start = source.start + row.to(tl.int64) * source.stride * source.align
    return tl.load(start[:, None] + col[None, :], mask=inside[:, None], other=0.0).to(tl.float32)


@triton.jit
def _largest_finite(x):
    x = tl.abs(x)
    return tl.max(tl.max(tl.where(x < float("inf"), x, 0.0), 1), 0)


@kernel
def maxima_kernel(source: TokenRows, maxima, s_kv: tl.int32, ROPE: tl.constexpr, ROWS: tl.constexpr):
    """Each program writes the largest finite absolute value of its rows."""
    largest = tl.zeros([], tl.float32)
    for first in range(tl.program_id(0) * ROWS, s_kv, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        largest = tl.maximum(largest, _largest_finite(_load(source, row, row < s_kv, 0, 512)))
        if ROPE:
            largest = tl.maximum(largest, _largest_finite(_load(source, row, row < s_kv, 512, ROPE)))
    tl.store(maxima + tl.program_id(0), largest)


@triton.jit
def _store(rows, row, inside, x, inverse, WIDTH: tl.constexpr, FIRST_COL: tl.constexpr):
    col = FIRST_COL + tl.arange(0, x.shape[1])
    target = rows + (row.to(tl.int64) * WIDTH)[:, None] + col[None, :]
    tl.store(target, (x * inverse).to(tl.float8e4nv), mask=inside[:, None])


@kernel
def quantize_kernel(
    source: TokenRows,
    rows,
    maxima,
    scale,
    programs: tl.int32,
    s_kv: tl.int32,
    MAXIMA: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write ``rows`` [s_kv, 512 + ROPE], and the scale: the smallest power of two for which the largest of ``maxima``
    is at most 448."""
    number = tl.arange(0, MAXIMA)
    amax = tl.max(tl.load(maxima + number, mask=number < programs, other=0.0), 0)
    factor = power_of_two_scale(amax)
    if tl.program_id(0) == 0:
        tl.store(scale, factor)
    inverse = 1.0 / factor
    for first in range(tl.program_id(0) * ROWS, s_kv, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        _store(rows, row, row < s_kv, _load(source, row, row < s_kv, 0, 512), inverse, 512 + ROPE, 0)
        if ROPE:
            _store(rows, row, row < s_kv, _load(source, row, row < s_kv, 512, ROPE), inverse, 512 + ROPE, 512)
