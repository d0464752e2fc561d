"""The terms and the mask of attention scores."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.online_softmax import LN_2, LOG2_E
from flashlatte.runtime.kernel_records import Float32, Int32, Int64, Pointer

# Below this value the next term of tanh's series is relatively less than 2^-22.
_SMALL_TANH = tl.constexpr(0.125)


class ScoreTerms(NamedTuple):
    """The terms of a score other than the scale: softcap, ALiBi slopes [h_q], and the bias between new queries
    [qq_bias_size, qq_bias_size]."""

    softcap: Float32
    alibi_slopes: Pointer
    alibi_stride: Int64
    qq_bias: Pointer
    qq_bias_stride: Int64
    qq_bias_size: Int32


@triton.jit
def add_terms(scores, terms, slopes, position, keys, context, query, step: tl.constexpr):
    """Scores [rows, keys] with all terms, in base 2 before and after. ``query`` [rows]: index of the row's query in its
    request. ``slopes`` [rows]: ALiBi's.

    tanh(x) = sign(x) (1 - t) / (1 + t) with t = e^(-2|x|), which cannot overflow. For small x it loses precision, which
    a large softcap would amplify; there x - x³/3 + 2x⁵/15 is used.
    """
    if step.softcap:
        x = scores * (LN_2 / terms.softcap)
        t = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
        tanh = (1.0 - t) / (1.0 + t)
        square = x * x
        small = x + x * square * (square * (2 / 15) - 1 / 3)
        tanh = tl.where(tl.abs(x) < _SMALL_TANH, small, tl.where(x < 0, -tanh, tanh))
        scores = tanh * (terms.softcap * LOG2_E)
    if step.alibi:
        distance = tl.abs(position[:, None] - keys[None, :]).to(tl.float32)
        if step.alibi_sqrt:
            distance = tl.sqrt(distance)
        scores -= (slopes * LOG2_E)[:, None] * distance
    if terms.qq_bias is not None:
        column = keys - context
        inside = (query < terms.qq_bias_size)[:, None] & ((column >= 0) & (column < terms.qq_bias_size))[None, :]
        pointers = terms.qq_bias + query.to(tl.int64)[:, None] * terms.qq_bias_stride + column[None, :]
        scores += tl.load(pointers, mask=inside, other=0.0) * LOG2_E
    return scores


@triton.jit
def is_visible(ranges, request, position, lower, upper, keys):
    """The mask of visible keys [rows, keys]: those of the row's window, lower to upper, and of a range that the row is
    in."""
    visible = (keys[None, :] >= lower[:, None]) & (keys[None, :] <= upper[:, None])
    if ranges.prefix_ranges is not None:
        of_request = ranges.prefix_ranges + request * ranges.prefix_stride_request
        for number in range(0, ranges.num_prefix_ranges):
            address = of_request + number * ranges.prefix_stride_range
            first = tl.load(address)
            last = tl.load(address + 1)
            row_inside = (position >= first) & (position <= last)
            key_inside = (keys >= first) & (keys <= last)
            visible = visible | (row_inside[:, None] & key_inside[None, :])
    return visible
