"""Online softmax with lazy rescaling of the output.

P is relative to ``row_max``, which is raised to the running maximum only if P would exceed 2^HEADROOM. The precision of
P does not depend on it, and rescaling the output costs as much as the rest of the softmax. Scores are unscaled;
``row_max`` is in base 2: a score times ``scale`` = softmax_scale · log2(e).
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAssignmentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.ptx import registers

HEADROOM = gl.constexpr(8.0)
# row_max of a row without a visible key: below any score, and finite, so that subtracting it from itself gives 0.
NO_SCORE = gl.constexpr(-1e30)


class ConsumerState(NamedTuple):
    """A consumer's unnormalized output, and the statistics of its rows."""

    out: Any  # float32 [rows, columns], or a tuple of such tiles
    row_max: Any  # [rows], the maximum that P is relative to
    row_sum: Any  # [rows], of P


@gluon.jit
def raise_row_max(row_max, scores, scale):
    """row_max, raised to the maximum of the scores where that exceeds it by more than HEADROOM."""
    block_max = gl.max(scores, 1) * scale
    return gl.where(block_max - row_max > HEADROOM, block_max, row_max)


@gluon.jit
def probabilities(scores, row_max, scale):
    """P = 2^(scores · scale - row_max)."""
    return gl.exp2(scores * scale - row_max[:, None])


@gluon.jit
def inverse(row_sum):
    """1 / row_sum, the factor that normalizes the output; 0 for a row without a visible key."""
    return gl.where(row_sum == 0, 0.0, 1.0 / row_sum)


@gluon.jit
def lse2_of(row_max, row_sum):
    """The base-2 lse of rows; -inf for a row without a visible key."""
    return gl.where(row_sum == 0, float("-inf"), row_max + gl.log2(row_sum))


@gluon.jit
def rescale(out, alpha):
    """``out`` [64, columns] times ``alpha`` [64]. A warp skips the multiplication if alpha is 1 in all of its rows."""
    ROWS: gl.constexpr = gl.SliceLayout(1, out.type.layout)
    return registers.rescale(out, gl.convert_layout(alpha, ROWS, assert_trivial=True)[:, None])
