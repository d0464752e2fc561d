"""Queries as the kernel multiplies them with a cache's keys: rotated if the keys are, and fp16 with a scale a row."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton.language as tl

from flashlatte.kernels.triton.fp8 import to_float32
from flashlatte.kernels.triton.turboquant import hadamard
from flashlatte.runtime.triton_kernel import kernel


@kernel
def rotate_queries_kernel(
    q,
    q_stride_request: tl.int64,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    rotated,
    row_scale,
    factor: tl.float32,
    rows: tl.int64,
    tokens: tl.int64,
    heads: tl.int64,
    D: tl.constexpr,
    ROTATES: tl.constexpr,
    Q_ALIGN: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """``rotated`` [rows, D] · ``row_scale`` [rows] is q, or q times the Hadamard matrix of 1 and -1, times ``factor``.

    The largest number of a row is from 1 to 2 in ``rotated``, so that fp16 has all of them to 2^-11 of it.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    valid = row < rows
    token = row // heads
    request = token // tokens
    offset = request * q_stride_request + (token % tokens) * q_stride_token + (row % heads) * q_stride_head
    col = tl.arange(0, D)[None, :]
    x = tl.load(q + offset[:, None] * Q_ALIGN + col, mask=valid[:, None], other=0.0)  # [BLOCK_R, D]
    if INTERPRETED:
        x = to_float32(x, INTERPRETED)
    y = tl.dot(x, hadamard(D, x.dtype), input_precision="ieee") if ROTATES else x.to(tl.float32)
    exponent = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1) >> 23
    # Powers of two and their reciprocals are normal numbers.
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    reciprocal = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(rotated + row[:, None] * D + col, (y * reciprocal[:, None]).to(tl.float16), mask=valid[:, None])
    # Never 0, which the maximum of no scores, -inf, is multiplied with.
    scale = tl.maximum((exponent << 23).to(tl.float32, bitcast=True) * factor, 1e-37)
    tl.store(row_scale + row, scale, mask=valid)
