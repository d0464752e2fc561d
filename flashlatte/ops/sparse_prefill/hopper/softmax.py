"""Scores, and a consumer's share of the running softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashlatte.kernels.hopper import lazy_softmax
from flashlatte.runtime.gluon_compat import aggregate

SCORE_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUT_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
WEIGHT_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, OUT_LAYOUT, 2))
SCORE_ROW = gl.constexpr(gl.SliceLayout(1, SCORE_LAYOUT))
SCORE_COLUMN = gl.constexpr(gl.SliceLayout(0, SCORE_LAYOUT))
OUT_ROW = gl.constexpr(gl.SliceLayout(1, OUT_LAYOUT))
QUERY_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, SCORE_LAYOUT, 2))

# Below any score, and finite, so that the difference of two references of empty rows is 0 and not NaN.
NO_SCORE = gl.constexpr(-1e30)


@aggregate
class Attention:
    """A consumer's 256 columns of the output, and the softmax statistics of the keys seen.

    Both consumers have the same reference; each sums, and takes the maximum of, its own blocks alone.
    """

    out: gl.tensor  # float32 [64, 256], not yet divided by the sum
    reference: gl.tensor  # [64], the raw score whose weight is 1
    row_sum: gl.tensor  # [64], of weights
    row_max: gl.tensor  # [64], of raw scores

    @gluon.constexpr_function
    def __init__(self, out, reference, row_sum, row_max):
        self.out = out
        self.reference = reference
        self.row_sum = row_sum
        self.row_max = row_max


@gluon.jit
def empty_attention():
    none = gl.full([64], NO_SCORE, gl.float32, SCORE_ROW)
    return Attention(gl.zeros([64, 256], gl.float32, OUT_LAYOUT), none, gl.zeros([64], gl.float32, SCORE_ROW), none)


@gluon.jit
def raised(reference, block_max, scale_log2):
    """The reference, raised to the block's maximum where its weights would grow too large."""
    return gl.where((block_max - reference) * scale_log2 > lazy_softmax.HEADROOM, block_max, reference)


@gluon.jit
def rescale(out, factor):
    """out x factor, skipped by warps whose rows all have factor 1."""
    return lazy_softmax.rescale(out, gl.convert_layout(factor, OUT_ROW, assert_trivial=True)[:, None])


@gluon.jit
def weights_of(scores, reference, scale_log2):
    return gl.exp2(scores * scale_log2 - (reference * scale_log2)[:, None])


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
    last = q_right.slice(192, 64, dim=1).load(QUERY_LAYOUT)
    if HEAD_DIM == 576:
        return HeldQueries(last, q.rope.index(opaque_zero).load(QUERY_LAYOUT))
    else:
        return HeldQueries(last, q_right.slice(128, 64, dim=1).load(QUERY_LAYOUT))


@gluon.jit
def start_scores(q, q_held, k, ready, phase, opaque_zero, unused, HEAD_DIM: gl.constexpr):
    """Start q x k, following the arrival of k, for ``finish_scores``.

    ``unused`` is a [64, 64] tensor whose registers the scores may take.
    """
    pending = start_left_scores(q, k, ready, phase, opaque_zero, unused)
    return add_right_scores(pending, q, q_held, k, ready, phase, opaque_zero, HEAD_DIM)


@gluon.jit
def start_left_scores(q, k, ready, phase, opaque_zero, unused):
    """The share of columns 0 to 255 of ``start_scores``."""
    q_left = q.left.index(opaque_zero)
    k_left = k.left.index(opaque_zero)
    mbarrier.wait(ready.quarter0, phase)
    scores = warpgroup_mma(
        q_left.slice(0, 128, dim=1), k_left.slice(0, 128, dim=1).permute((1, 0)), unused, use_acc=False, is_async=True
    )
    mbarrier.wait(ready.quarter1, phase)
    return warpgroup_mma(
        q_left.slice(128, 128, dim=1), k_left.slice(128, 128, dim=1).permute((1, 0)), scores, is_async=True
    )


@gluon.jit
def add_right_scores(scores, q, q_held, k, ready, phase, opaque_zero, HEAD_DIM: gl.constexpr):
    """The share of the other columns of ``start_scores``."""
    q_right = q.right.index(opaque_zero)
    k_right = k.right.index(opaque_zero)
    mbarrier.wait(ready.quarter2, phase)
    if HEAD_DIM == 576:
        scores = warpgroup_mma(q_held.other, k.rope.index(opaque_zero).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(
        q_right.slice(0, 128, dim=1), k_right.slice(0, 128, dim=1).permute((1, 0)), scores, is_async=True
    )
    mbarrier.wait(ready.quarter3, phase)
    k_third = k_right.slice(128, 64, dim=1).permute((1, 0))
    if HEAD_DIM == 576:
        scores = warpgroup_mma(q_right.slice(128, 64, dim=1), k_third, scores, is_async=True)
    else:
        scores = warpgroup_mma(q_held.other, k_third, scores, is_async=True)
    return warpgroup_mma(q_held.last, k_right.slice(192, 64, dim=1).permute((1, 0)), scores, is_async=True)


@gluon.jit
def finish_scores(pending, mask, ready, phase):
    """The scores of the tokens that are selected, -inf for the others."""
    mbarrier.wait(ready.mask, phase)
    selected = mask.load(SCORE_COLUMN) != 0
    scores = warpgroup_mma_wait(0, deps=[pending])
    return gl.where(selected[None, :], scores, float("-inf"))
