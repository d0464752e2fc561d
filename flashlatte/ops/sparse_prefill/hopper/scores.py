"""Scores of a block of selected tokens, computed as the quarters of the block arrive."""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashlatte.kernels.hopper.mla_tiles import Q_OPERAND, SCORE_COLS, SCORE_ROWS


class HeldQueries(NamedTuple):
    """The columns of q that a consumer keeps in registers.

    A 64 x 64 product with both operands in shared memory takes 1.5 times as long on the tensor cores as with one
    operand in registers.
    """

    last: Any  # [64, 64], columns 448 to 511
    other: Any  # [64, 64], the RoPE columns; with head_dim 512, columns 384 to 447


@gluon.jit
def hold_queries(q, zero, HEAD_DIM: gl.constexpr):
    q_right = q.right.index(zero)
    last = q_right.slice(192, 64, dim=1).load(Q_OPERAND)
    if HEAD_DIM == 576:
        return HeldQueries(last, q.rope.index(zero).load(Q_OPERAND))
    else:
        return HeldQueries(last, q_right.slice(128, 64, dim=1).load(Q_OPERAND))


@gluon.jit
def start_scores(q, q_held, k, full, phase, zero, unused, HEAD_DIM: gl.constexpr):
    """Start q · k as k arrives; ``finish_scores`` completes it.

    ``unused``: a tensor [64, 64] whose registers the scores may reuse.
    """
    pending = start_left_scores(q, k, full, phase, zero, unused)
    return add_right_scores(pending, q, q_held, k, full, phase, zero, HEAD_DIM)


@gluon.jit
def start_left_scores(q, k, full, phase, zero, unused):
    """The part of ``start_scores`` for columns 0 to 255."""
    q_left = q.left.index(zero)
    k_left = k.left.index(zero)
    mbarrier.wait(full.quarter0, phase)
    scores = warpgroup_mma(
        q_left.slice(0, 128, dim=1), k_left.slice(0, 128, dim=1).permute((1, 0)), unused, use_acc=False, is_async=True
    )
    mbarrier.wait(full.quarter1, phase)
    return warpgroup_mma(
        q_left.slice(128, 128, dim=1), k_left.slice(128, 128, dim=1).permute((1, 0)), scores, is_async=True
    )


@gluon.jit
def add_right_scores(scores, q, q_held, k, full, phase, zero, HEAD_DIM: gl.constexpr):
    """The part of ``start_scores`` for the other columns."""
    q_right = q.right.index(zero)
    k_right = k.right.index(zero)
    mbarrier.wait(full.quarter2, phase)
    if HEAD_DIM == 576:
        scores = warpgroup_mma(q_held.other, k.rope.index(zero).permute((1, 0)), scores, is_async=True)
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
def finish_scores(pending, mask, full, phase, GROUP: gl.constexpr):
    """Wait for the scores; -inf for unselected tokens."""
    mbarrier.wait(full.mask, phase)
    if GROUP == 1:
        selected = (mask.load(SCORE_COLS) != 0)[None, :]
    else:
        query = gl.arange(0, 64, SCORE_ROWS) // (64 // GROUP)
        selected = (mask.load(SCORE_COLS)[None, :] & (1 << query)[:, None]) != 0
    scores = warpgroup_mma_wait(0, deps=[pending])
    return gl.where(selected, scores, float("-inf"))
