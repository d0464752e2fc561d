"""Logits from scores in registers: relu, head weights, sum over heads, and stores.

The rows of a tile are 64 keys and its columns the heads of a few queries, so that most of the sum over heads is within
a thread. A thread holds a quarter of the columns of two keys.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.ops.index_logits.hopper.tiles import KEYS
from flashlatte.runtime.kernel_records import ElementPointer, Int32, Int64


@gluon.constexpr_function
def exchange_layout(queries, step):
    """Layout of partial sums of the four threads of a row: [64, queries, 4] in step 0, [64, queries, 2] in step 1.

    In each step two threads exchange halves: each keeps half of its queries and receives the other thread's sums for
        them. That needs half of the shuffles of an all-reduce, and leaves each logit in one thread.
    """
    query_bits = [[0, 1 << bit, 0] for bit in range(queries.bit_length() - 1)]
    pair, none = [0, 0, 1], [0, 0, 0]
    if step == 0:
        lanes = [query_bits[0] if queries > 1 else pair, [0, 0, 2]]
        registers = [*query_bits[1:], *([pair] if queries > 1 else [])]
    else:
        lanes = [query_bits[0] if queries > 1 else none, query_bits[1] if queries > 2 else pair]
        registers = [*query_bits[2:], *([pair] if queries > 2 else [])]
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0, 0], *registers],
        lane_bases=[*lanes, [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, queries, 4 >> step],
    )


@gluon.constexpr_function
def logits_layout(queries):
    """Layout of logits [64 keys, queries]."""
    return gl.SliceLayout(2, exchange_layout(queries, 1))


@gluon.jit
def sum_over_heads(scores, weights, HEADS: gl.constexpr):
    """Σ_h weights · relu(scores), of scores [64, queries · heads] and weights [queries · heads]: [64, queries]."""
    QUERIES: gl.constexpr = scores.shape[1] // HEADS
    weighted = gl.maximum(scores, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
    # A thread holds two of every eight columns.
    weighted = weighted.reshape([KEYS, QUERIES, HEADS // 8, 4, 2]).permute((0, 1, 3, 2, 4))
    partial = gl.sum(weighted.reshape([KEYS, QUERIES, 4, HEADS // 4]), 3)
    partial = gl.convert_layout(partial, exchange_layout(QUERIES, 0))
    partial = gl.sum(partial.reshape([KEYS, QUERIES, 2, 2]), 3)
    partial = gl.convert_layout(partial, exchange_layout(QUERIES, 1))
    return gl.sum(partial, 2)


class LogitsOutput(NamedTuple):
    """Logits [rows, width], and whether column 0 of a row is its first visible key (1) or key 0 (0)."""

    logits: ElementPointer
    stride: Int64
    width: Int32
    compressed: Int32


@gluon.jit
def store(logits, first_key, rows):
    """Write ``logits`` [64, queries] of the keys from ``first_key`` on, where visible; ``rows`` is a ``LogitRows``."""
    key = first_key + gl.arange(0, KEYS, gl.SliceLayout(1, logits.type.layout))
    seen = (key[:, None] >= rows.start[None, :]) & (key[:, None] < rows.end[None, :])
    gl.store(rows.address[None, :] + key[:, None], logits.to(rows.address.dtype.element_ty), mask=seen)
