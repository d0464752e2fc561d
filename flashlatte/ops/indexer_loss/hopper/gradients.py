"""The last pass of the index kernel: gradients of index_q, index_weights and the selected index keys of a token.

With s = index_scale · index_q · index_k, r = 1 where s > 0 and G the gradients of the index logits:

    d index_q       = index_scale · index_weights · (G r) index_k       G r in registers
    d index_k[j]   += index_scale · G[j] · (r index_weights)ᵀ index_q   r index_weights in shared memory
    d index_weights = Σ_j G relu(s)
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from flashlatte.kernels.hopper.mla_tiles import KEYS, ROWS, SCORE_COLS, SCORE_ROWS
from flashlatte.kernels.hopper.ptx.copies import wait_stores_read
from flashlatte.kernels.hopper.ptx.staged_rows import STAGED_COLUMNS, row_of_thread, send_rows, stage_rows
from flashlatte.kernels.hopper.ptx.threads import warp_sync
from flashlatte.ops.indexer_loss.hopper.index_tiles import INDEX_DIM, is_valid, load_weights, next_keys, scores_of
from flashlatte.runtime.gluon_compat import cta_barrier
from flashlatte.runtime.kernel_records import Pointer

_GRADIENT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_GRADIENT_ROWS = gl.constexpr(gl.SliceLayout(1, _GRADIENT))
_GRADIENT_COLS = gl.constexpr(gl.SliceLayout(0, _GRADIENT))
_OPERAND = gl.constexpr(gl.DotOperandLayout(0, _GRADIENT, 2))


class IndexGradients(NamedTuple):
    """Gradients of index_q [s_q, h_i, 128], of index_k, float32 [s_kv, 128], to which the kernel adds, and of
    index_weights, float32 [s_q, h_i]."""

    index_q: Pointer
    index_k: Pointer
    index_weights: Pointer


class _SentRows(NamedTuple):
    """For each thread, the row of a tile that it sends, whether it sends one, and the pointer to the destination."""

    row: Any
    sends: Any
    target: Any


@gluon.jit
def _load_gradients(work, step, LAYOUT: gl.constexpr):
    """G [64] of a step: 0 after the last slot, and for invalid keys."""
    slot = step * KEYS + gl.arange(0, KEYS, LAYOUT)
    return gl.load(work.logits + slot, mask=slot < work.count, other=0.0)


@gluon.jit
def _sent_rows(work, step, d_index_k):
    row = row_of_thread()
    slot = step * KEYS + row
    index = gl.load(work.indices + slot, mask=(row >= 0) & (slot < work.count), other=-1)
    sends = is_valid(work, index)
    return _SentRows(row, sends, d_index_k + gl.where(sends, index, 0).to(gl.int64) * INDEX_DIM)


@gluon.jit
def add_gradients(work, indexer, indices, sees, tiles, gradients):
    """Write the gradients of index_q and index_weights, and add to that of index_k.

    Args:
        indices: result of ``start_keys``.
        sees: whether the token attends to any key; if not, its index_q may be NaN.
    """
    weight = load_weights(indexer, work.token, sees, SCORE_ROWS)
    unused = gl.zeros([KEYS, INDEX_DIM], gl.float32, _GRADIENT)
    d_q = gl.zeros([ROWS, INDEX_DIM], gl.float32, _GRADIENT)
    d_weight = gl.zeros([ROWS], gl.float32, SCORE_ROWS)
    for step in range(gl.where(sees, (work.count + KEYS - 1) // KEYS, 0)):
        k = tiles.k.index(step & 1)
        indices = next_keys(work, step, indices, tiles)
        g_columns = _load_gradients(work, step, SCORE_COLS)
        g_rows = _load_gradients(work, step, _GRADIENT_ROWS) * indexer.index_scale
        sent = _sent_rows(work, step, gradients.index_k)
        scores = scores_of(tiles, step, indexer.index_scale)

        d_scores = gl.zeros_like(scores) + g_columns[None, :]
        weighted = gl.zeros_like(scores) + weight[:, None]
        if indexer.use_relu:
            d_scores = gl.where(scores > 0, d_scores, 0.0)
            weighted = gl.where(scores > 0, weighted, 0.0)
        tiles.weighted.store(weighted.to(k.dtype))
        fence_async_shared()
        operand = gl.convert_layout(d_scores.to(k.dtype), _OPERAND, assert_trivial=True)
        d_q = warpgroup_mma(operand, k, d_q, is_async=True)
        cta_barrier()
        d_k = warpgroup_mma(tiles.weighted.permute((1, 0)), tiles.q, unused, use_acc=False, is_async=True)
        d_weight += gl.sum(d_scores * scores, axis=1)
        # Until TMA has read the staged rows of the previous step.
        wait_stores_read()
        warp_sync()
        d_q, d_k = warpgroup_mma_wait(0, deps=[d_q, d_k])
        stage_rows(d_k * g_rows[:, None], tiles.staged, 0)
        fence_async_shared()
        warp_sync()
        send_rows(sent.target, tiles.staged, sent.row, sent.sends, STAGED_COLUMNS, True)
        cta_barrier()

    head = gl.arange(0, ROWS, _GRADIENT_ROWS)
    d_q *= (load_weights(indexer, work.token, sees, _GRADIENT_ROWS) * indexer.index_scale)[:, None]
    first_row = work.token.to(gl.int64) * indexer.h_i
    columns = gl.arange(0, INDEX_DIM, _GRADIENT_COLS)
    pointers = (gradients.index_q + (first_row + head) * INDEX_DIM)[:, None] + columns[None, :]
    gl.store(pointers, d_q.to(indexer.q.dtype.element_ty), mask=(head < indexer.h_i)[:, None])
    head_of_weight = gl.arange(0, ROWS, SCORE_ROWS)
    gl.store(gradients.index_weights + first_row + head_of_weight, d_weight, mask=head_of_weight < indexer.h_i)
    wait_stores_read()
