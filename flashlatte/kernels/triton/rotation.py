"""Rotary position embeddings of several rows of a token."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import unit_bytes
from flashlatte.kernels.triton.fp8 import narrow, widen
from flashlatte.runtime.strides import stride_in_use


def unit_of_rows(x: torch.Tensor) -> int:
    """The elements, as many as 16 bytes hold at most, at multiples of which the rows of x [T, h, n] begin.

    A kernel that is given strides as so many units knows how rows are aligned.
    """
    return max(unit_bytes(x, stride_in_use(x, 0), stride_in_use(x, 1)) // x.element_size(), 1)


@triton.jit
def rotate_rows(
    x_rows,
    out_rows,
    there,
    cosine,
    sine,
    PAIRS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Rotate the rows that are ``there`` by float32 cosines and sines [1, BLOCK_PAIRS].

    Each row has 2 · PAIRS numbers. ``x_rows`` and ``out_rows``, pointers [BLOCK_H, 1] to where rows begin, may be the
    same: each number is read before it is written.
    """
    if INTERLEAVED:
        # Whole rows: by a load of one number of each pair, a warp would take one of each of 32 rows at a time.
        column = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
        mask = there & (column < 2 * PAIRS)
        # [BLOCK_H, BLOCK_PAIRS, 2]
        pairs = tl.reshape(tl.load(x_rows + column, mask=mask, other=0.0), [BLOCK_H, BLOCK_PAIRS, 2])
        a, b = tl.split(widen(pairs, INTERPRETED))
        turned = narrow(tl.join(a * cosine - b * sine, b * cosine + a * sine), out_rows.dtype.element_ty, INTERPRETED)
        tl.store(out_rows + column, tl.reshape(turned, [BLOCK_H, 2 * BLOCK_PAIRS]), mask=mask)
    else:
        pair = tl.arange(0, BLOCK_PAIRS)[None, :]
        mask = there & (pair < PAIRS)
        # [BLOCK_H, BLOCK_PAIRS]
        a = widen(tl.load(x_rows + pair, mask=mask, other=0.0), INTERPRETED)
        b = widen(tl.load(x_rows + PAIRS + pair, mask=mask, other=0.0), INTERPRETED)
        tl.store(out_rows + pair, narrow(a * cosine - b * sine, out_rows.dtype.element_ty, INTERPRETED), mask=mask)
        x = narrow(b * cosine + a * sine, out_rows.dtype.element_ty, INTERPRETED)
        tl.store(out_rows + PAIRS + pair, x, mask=mask)
