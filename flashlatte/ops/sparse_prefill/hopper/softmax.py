"""Scores of a block, and a consumer's share of the softmax.

Here ``row_max`` is a raw score, not times the scale as in ``kernels.hopper.softmax``: the maximum of raw scores is a
result of the operation as well.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashlatte.kernels.hopper.mla_tiles import HALF, OUTPUT, Q_OPERAND, ROWS, SCORE_COLS, SCORE_ROWS
from flashlatte.kernels.hopper.softmax import HEADROOM, NO_SCORE
from flashlatte.runtime.gluon_compat import aggregate

P_OPERAND = gl.constexpr(gl.DotOperandLayout(0, OUTPUT, 2))


@aggregate
class Attention:
    """A consumer's 256 columns of the output, and the softmax statistics of the keys seen.

    Both consumers have the same row_max; each sums, and takes the maximum of, its own blocks alone.
    """

    out: gl.tensor  # float32 [64, 256], not yet divided by the sum
    row_max: gl.tensor  # [64], the raw score whose P is 1: near the maximum
    row_sum: gl.tensor  # [64], of P
    score_max: gl.tensor  # [64], the maximum of raw scores

    @gluon.constexpr_function
    def __init__(self, out, row_max, row_sum, score_max):
        self.out = out
        self.row_max = row_max
        self.row_sum = row_sum
        self.score_max = score_max


@gluon.jit
def empty_attention():
    none = gl.full([ROWS], NO_SCORE, gl.float32, SCORE_ROWS)
    return Attention(gl.zeros([ROWS, HALF], gl.float32, OUTPUT), none, gl.zeros([ROWS], gl.float32, SCORE_ROWS), none)


@gluon.jit
def raise_row_max(row_max, block_max, scale_log2):
    """row_max, raised to the block's maximum where its P would grow too large."""
    return gl.where((block_max - row_max) * scale_log2 > HEADROOM, block_max, row_max)


@gluon.jit
def probabilities(scores, row_max, scale_log2):
    """P = 2^((scores - row_max) · scale_log2)."""
    return gl.exp2(scores * scale_log2 - (row_max * scale_log2)[:, None])


@aggregate
class HeldQueries:
    """The columns of q that a consumer keeps in registers.

    A product of 64 x 64 with both operands in shared memory takes the tensor cores half as long again as with one.
    """

    last: gl.tensor  # [64, 64], columns 448 to 511
    other: gl.tensor  # [64, 64], the RoPE columns; with head_dim 512, columns 384 to 447

    @gluon.constexpr_function
    def __init__(self, last, other):
        self.last = last
        self.other = other


@gluon.jit
def hold_queries(q, opaque_zero, HEAD_DIM: gl.constexpr):
    q_right = q.right.index(opaque_zero)
    last = q_right.slice(192, 64, dim=1).load(Q_OPERAND)
    if HEAD_DIM == 576:
        return HeldQueries(last, q.rope.index(opaque_zero).load(Q_OPERAND))
    else:
        return HeldQueries(last, q_right.slice(128, 64, dim=1).load(Q_OPERAND))


@gluon.jit
def start_scores(q, q_held, k, full, phase, opaque_zero, unused, HEAD_DIM: gl.constexpr):
    """Start q x k, following the arrival of k, for ``finish_scores``.

    ``unused`` is a [64, 64] tensor whose registers the scores may take.
    """
    pending = start_left_scores(q, k, full, phase, opaque_zero, unused)
    return add_right_scores(pending, q, q_held, k, full, phase, opaque_zero, HEAD_DIM)


@gluon.jit
def start_left_scores(q, k, full, phase, opaque_zero, unused):
    """The share of columns 0 to 255 of ``start_scores``."""
    q_left = q.left.index(opaque_zero)
    k_left = k.left.index(opaque_zero)
    mbarrier.wait(full.quarter0, phase)
    scores = warpgroup_mma(
        q_left.slice(0, 128, dim=1), k_left.slice(0, 128, dim=1).permute((1, 0)), unused, use_acc=False, is_async=True
    )
    mbarrier.wait(full.quarter1, phase)
    return warpgroup_mma(
        q_left.slice(128, 128, dim=1), k_left.slice(128, 128, dim=1).permute((1, 0)), scores, is_async=True
    )


@gluon.jit
def add_right_scores(scores, q, q_held, k, full, phase, opaque_zero, HEAD_DIM: gl.constexpr):
    """The share of the other columns of ``start_scores``."""
    q_right = q.right.index(opaque_zero)
    k_right = k.right.index(opaque_zero)
    mbarrier.wait(full.quarter2, phase)
    if HEAD_DIM == 576:
        scores = warpgroup_mma(q_held.other, k.rope.index(opaque_zero).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(
        q_right.slice(0, 128, dim=1), k_right.slice(0, 128, dim=1).permute((1, 0)), scores, is_async=True
    )
    mbarrier.wait(full.quarter3, phase)
    k_third = k_right.slice(128, 64, dim=1).permute((1, 0))
    if HEAD_DIM == 576:
        scores = warpgroup_mma(q_right.slice(128, 64, dim=1), k_third, scores, is_async=True)
    else:
        scores = warpgroup_mma(q_held.other, k_third, scores, is_async=True)
    return warpgroup_mma(q_held.last, k_right.slice(192, 64, dim=1).permute((1, 0)), scores, is_async=True)


@gluon.jit
def finish_scores(pending, mask, full, phase):
    """The scores of the tokens that are selected, -inf for the others."""
    mbarrier.wait(full.mask, phase)
    selected = mask.load(SCORE_COLS) != 0
    scores = warpgroup_mma_wait(0, deps=[pending])
    return gl.where(selected[None, :], scores, float("-inf"))
