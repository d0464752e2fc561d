"""``mhc_pre`` and ``mhc_post`` in Triton: a program processes all streams of a token, or some of its columns."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import alignment_elements, cdiv
from flashlatte.kernels.triton.fp8 import from_float32, to_float32
from flashlatte.ops.mhc.reference import MhcPreParams
from flashlatte.runtime.kernel_records import Pointer
from flashlatte.runtime.triton_kernel import kernel

# Columns of a stream per step, and warps of a program. The kernels are bound by memory and latency.
PRE_COLUMNS, PRE_WARPS = 2048, 8
POST_COLUMNS, POST_WARPS = 1024, 4


class MhcProjection(NamedTuple):
    """A token's coefficients are ``projected`` / r · ``scale`` + ``base``."""

    projected: Pointer
    base: Pointer
    scale: Pointer


def mhc_pre(params: MhcPreParams) -> None:
    streams, layer_input = params.streams, params.layer_input
    tokens, count, width = streams.shape
    unit = _unit(streams, layer_input)
    mhc_pre_kernel[(tokens,)](
        MhcProjection(params.projected, params.base, params.scale),
        streams=streams,
        shares=params.shares,
        mixture=params.mixture,
        layer_input=layer_input,
        rms_eps=params.rms_eps,
        eps=params.eps,
        iterations=params.iterations,
        units=width // unit,
        N=count,
        BLOCK_D=PRE_COLUMNS,
        ALIGN=unit,
        num_warps=PRE_WARPS,
    )


def mhc_post(
    result: torch.Tensor, streams: torch.Tensor, shares: torch.Tensor, mixture: torch.Tensor, out: torch.Tensor
) -> None:
    tokens, count, width = streams.shape
    unit = _unit(streams, result, out)
    mhc_post_kernel[(tokens, cdiv(width, POST_COLUMNS))](
        result=result,
        streams=streams,
        shares=shares,
        mixture=mixture,
        out=out,
        units=width // unit,
        N=count,
        BLOCK_D=POST_COLUMNS,
        ALIGN=unit,
        num_warps=POST_WARPS,
    )


def _unit(*rows: torch.Tensor) -> int:
    """The largest number of elements, up to 16 bytes, that divides the addresses and widths of all rows."""
    return min(alignment_elements(x, x.shape[-1]) for x in rows)


@kernel
def mhc_pre_kernel(
    projection: MhcProjection,
    streams,
    shares,
    mixture,
    layer_input,
    rms_eps: tl.float32,
    eps: tl.float32,
    iterations: tl.int32,
    units: tl.int32,
    N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Process one token. A stream has ``units`` · ALIGN columns."""
    BLOCK_N: tl.constexpr = triton.next_power_of_2(N)
    token = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, BLOCK_N)
    in_streams = stream < N
    rows = streams + ((token * N + stream) * units)[:, None] * ALIGN  # [BLOCK_N, 1]
    squares = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for begin in range(0, units * ALIGN, BLOCK_D):
        column = begin + tl.arange(0, BLOCK_D)[None, :]
        x = to_float32(tl.load(rows + column, mask=in_streams[:, None] & (column < units * ALIGN), other=0.0))
        squares += x * x
    inverse = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / (N * units * ALIGN) + rms_eps)

    projected, base, scale = projection.projected + token * ((2 + N) * N), projection.base, projection.scale
    weight = tl.sigmoid(_scaled(projected, base, tl.load(scale) * inverse, stream, in_streams)) + eps  # [BLOCK_N]
    share = 2 * tl.sigmoid(_scaled(projected, base, tl.load(scale + 1) * inverse, N + stream, in_streams))
    tl.store(shares + token * N + stream, share, mask=in_streams)
    offset = stream[:, None] * N + stream[None, :]
    inside = in_streams[:, None] & in_streams[None, :]
    mixed = _scaled(projected, base, tl.load(scale + 2) * inverse, 2 * N + offset, inside)  # [BLOCK_N, BLOCK_N]
    mixed = tl.where(inside, mixed, float("-inf"))
    row_max = tl.where(in_streams, tl.max(mixed, axis=1), 0.0)
    mixed = tl.exp(mixed - row_max[:, None])
    mixed = tl.where(inside, mixed / _divisor(tl.sum(mixed, axis=1), 0.0, in_streams)[:, None] + eps, 0.0)
    mixed /= _divisor(tl.sum(mixed, axis=0), eps, in_streams)[None, :]
    for _ in range(iterations - 1):
        mixed /= _divisor(tl.sum(mixed, axis=1), eps, in_streams)[:, None]
        mixed /= _divisor(tl.sum(mixed, axis=0), eps, in_streams)[None, :]
    tl.store(mixture + token * (N * N) + offset, mixed, mask=inside)

    for begin in range(0, units * ALIGN, BLOCK_D):
        column = begin + tl.arange(0, BLOCK_D)
        in_row = column < units * ALIGN
        x = to_float32(tl.load(rows + column[None, :], mask=in_streams[:, None] & in_row[None, :], other=0.0))
        collapsed = tl.sum(tl.where(in_streams, weight, 0.0)[:, None] * x, axis=0)
        row = layer_input + token * units * ALIGN
        tl.store(row + column, from_float32(collapsed, layer_input.dtype.element_ty), mask=in_row)


@triton.jit
def _scaled(projected, base, factor, offset, inside):
    """Projected values times a factor, plus their base."""
    return tl.load(projected + offset, mask=inside, other=0.0) * factor + tl.load(base + offset, mask=inside, other=0.0)


@triton.jit
def _divisor(sums, eps, in_streams):
    """The divisors of rows or columns; 1 beyond the last stream."""
    return tl.where(in_streams, sums + eps, 1.0)


@kernel
def mhc_post_kernel(
    result, streams, shares, mixture, out, units: tl.int32, N: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr
):
    """Process BLOCK_D columns of a token. A stream has ``units`` · ALIGN columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row = column < units * ALIGN
    of_layer = to_float32(tl.load(result + token * units * ALIGN + column, mask=in_row, other=0.0))
    for j in tl.static_range(N):
        mixed = tl.load(shares + token * N + j) * of_layer
        for i in tl.static_range(N):
            x = to_float32(tl.load(streams + (token * N + i) * units * ALIGN + column, mask=in_row, other=0.0))
            mixed += tl.load(mixture + token * (N * N) + i * N + j) * x
        offset = (token * N + j) * units * ALIGN + column
        tl.store(out + offset, from_float32(mixed, out.dtype.element_ty), mask=in_row)
