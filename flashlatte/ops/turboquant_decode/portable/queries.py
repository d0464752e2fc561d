"""Preparation of queries: rotated if the keys are, and in fp16 with a scale per row."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

from flashlatte.kernels.triton.fp8 import to_float32
from flashlatte.kernels.triton.turboquant import hadamard
from flashlatte.runtime.kernel_records import Int64, Pointer
from flashlatte.runtime.triton_kernel import INTERPRETED, kernel


class TurboQuantQuery(NamedTuple):
    """q [b, tokens, heads, d], strides in units of Q_ALIGN elements."""

    q: Pointer
    stride_request: Int64
    stride_token: Int64
    stride_head: Int64
    tokens: Int64
    heads: Int64


@kernel
def rotate_queries_kernel(
    query: TurboQuantQuery,
    rotated,
    row_scale,
    factor: tl.float32,
    rows: tl.int64,
    D: tl.constexpr,
    ROTATES: tl.constexpr,
    Q_ALIGN: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """``rotated`` [rows, D] · ``row_scale`` [rows] is q, or q times the Hadamard matrix of 1 and -1, times ``factor``.

    The largest element of a row of ``rotated`` is from 1 to 2, so the error of fp16 is at most 2^-11 of it.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    valid = row < rows
    token = row // query.heads
    request = token // query.tokens
    offset = request * query.stride_request + (token % query.tokens) * query.stride_token
    offset += (row % query.heads) * query.stride_head
    col = tl.arange(0, D)[None, :]
    x = tl.load(query.q + offset[:, None] * Q_ALIGN + col, mask=valid[:, None], other=0.0)  # [BLOCK_R, D]
    if INTERPRETED:
        x = to_float32(x)
    y = tl.dot(x, hadamard(D, x.dtype), input_precision="ieee") if ROTATES else x.to(tl.float32)
    exponent = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1) >> 23
    # The power of two and its reciprocal must be normal numbers.
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    reciprocal = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(rotated + row[:, None] * D + col, (y * reciprocal[:, None]).to(tl.float16), mask=valid[:, None])
    # Not 0: the maximum of no scores is -inf, and 0 times -inf is NaN.
    scale = tl.maximum((exponent << 23).to(tl.float32, bitcast=True) * factor, 1e-37)
    tl.store(row_scale + row, scale, mask=valid)
