"""The divergence of a softmax of index logits from a target, and its gradient, for Triton and Gluon kernels.

A kernel reads the slots of a token in blocks, and keeps sums for each lane of a block. A masked slot has logit -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.online_softmax import LN_2, LOG2_E

# Below it log t is that of this value, so that t = 0 contributes 0.
_SMALLEST_TARGET = tl.constexpr(1e-10)


@triton.jit
def add_logits(lane_max, lane_sum, logit):
    """The maximum of each lane's logits, and the sum of e^(logit - maximum), after those of another block."""
    new_max = tl.maximum(lane_max, logit)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    return new_max, lane_sum * tl.exp2((lane_max - shift) * LOG2_E) + tl.exp2((logit - shift) * LOG2_E)


@triton.jit
def lse_of_lanes(lane_max, lane_sum):
    """The lse of all lanes; 0 if all slots are masked."""
    row_max = tl.max(lane_max, axis=0)
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.sum(lane_sum * tl.exp2((lane_max - shift) * LOG2_E), axis=0)
    return shift + tl.log2(tl.where(row_sum == 0, 1.0, row_sum)) * LN_2


@triton.jit
def divergence_terms(logit, t, lse, has_target):
    """t (log t - log p) of each slot, and p - t, the gradient of the logit, with p = e^(logit - lse).

    Without a target, because all probabilities of the token underflow, t is 0 and so are both results.
    """
    log_p = tl.where(logit == float("-inf"), 0.0, logit - lse)
    terms = t * (tl.log2(tl.maximum(t, _SMALLEST_TARGET)) * LN_2 - log_p)
    p = tl.where(logit == float("-inf"), 0.0, tl.exp2(log_p * LOG2_E))
    # Not in one condition: Triton's interpreter fails if a scalar comparison is combined with a block.
    return terms, tl.where(has_target, p, 0.0) - t
