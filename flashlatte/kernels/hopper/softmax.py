"""The online softmax, with an output that is rescaled only when it must be.

A row's probabilities P are relative to ``row_max``, which follows the running maximum only where P would grow beyond
2^HEADROOM. Their precision does not depend on it, and rescaling the output costs as much as the rest of the softmax.
Scores are raw; ``row_max`` is in base 2, a score times ``scale`` = softmax_scale · log2(e).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.ptx import registers

HEADROOM = gl.constexpr(8.0)
# row_max of a row that has seen no key: below any score, and finite, so that it can be subtracted from itself.
NO_SCORE = gl.constexpr(-1e30)


class State(NamedTuple):
    """A warpgroup's share of an attention: output not yet divided by the sum, and statistics of its rows."""

    out: Any  # float32 [rows, columns]
    row_max: Any  # [rows], what P is relative to
    row_sum: Any  # [rows], of P


@gluon.jit
def raise_row_max(row_max, scores, scale):
    """row_max, raised to the scores' maximum where it would be too far below."""
    block_max = gl.max(scores, 1) * scale
    return gl.where(block_max - row_max > HEADROOM, block_max, row_max)


@gluon.jit
def probabilities(scores, row_max, scale):
    """P = 2^(scores · scale - row_max)."""
    return gl.exp2(scores * scale - row_max[:, None])


@gluon.jit
def inverse(row_sum):
    """What the output of rows is multiplied with in the end; 0 where a row has seen no key."""
    return gl.where(row_sum == 0, 0.0, 1.0 / row_sum)


@gluon.jit
def lse2_of(row_max, row_sum):
    """The base-2 lse of rows; -inf where a row has seen no key."""
    return gl.where(row_sum == 0, float("-inf"), row_max + gl.log2(row_sum))


@gluon.jit
def rescale(out, alpha):
    """``out`` [64, columns] times ``alpha`` [64], skipped by warps whose rows all have alpha 1."""
    ROWS: gl.constexpr = gl.SliceLayout(1, out.type.layout)
    return registers.rescale(out, gl.convert_layout(alpha, ROWS, assert_trivial=True)[:, None])
