"""The index kernel: index logits of a token's selected keys, their divergence from the target, and the gradients.

A program of four warps processes one token; two programs share an SM. Index keys are gathered twice, for the logits and
for the gradients: 64 keys per step, one step ahead. In the second pass each warp stages 16 rows of the index keys'
gradients in shared memory and adds them to global memory by TMA. These reductions are the bottleneck. They overlap with
the products of the next step, and with the first pass of the SM's other program.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from flashlatte.kernels.hopper.row_loads import LatentKeys
from flashlatte.ops.indexer_loss.hopper.gradients import IndexGradients, add_gradients
from flashlatte.ops.indexer_loss.hopper.index_tiles import IndexWork, allocate, load_q, start_keys
from flashlatte.ops.indexer_loss.hopper.loss import write_logits, write_loss
from flashlatte.ops.indexer_loss.seen_keys import IndexerRows, SlotRanges
from flashlatte.runtime.gluon_compat import cta_barrier
from flashlatte.runtime.triton_kernel import gluon_kernel


@gluon_kernel
def index_kernel(
    slots: SlotRanges,
    indexer: IndexerRows,
    gradients: IndexGradients,
    first_token: gl.int32,
    target,
    logits,
    losses,
    sees_keys,
    KEEP_GRADIENT: gl.constexpr,
    WITH_GRADIENT: gl.constexpr,
):
    """A program for each token from ``first_token`` on.

    Args:
        target, logits: float32 [tokens, width].
        losses, sees_keys: [s_q].
        KEEP_GRADIENT: overwrite ``logits`` with their gradients.
        WITH_GRADIENT: also compute the gradients of index_q, index_k and index_weights.
    """
    row = gl.program_id(0).to(gl.int64) * slots.width
    token = first_token + gl.program_id(0)
    work = IndexWork(
        token,
        slots.indices + token.to(gl.int64) * slots.indices_stride,
        gl.load(slots.ranges + slots.s_q + token),
        LatentKeys(indexer.k, indexer.k_stride),
        slots.s_kv,
        logits + row,
    )
    tiles = allocate(indexer.k.dtype.element_ty, WITH_GRADIENT)
    indices = start_keys(work, tiles)
    load_q(indexer, token, tiles.q)
    fence_async_shared()
    write_logits(work, indexer, indices, tiles)
    # Wait for the copies after the last step, which have no keys, and for the logits of all warps.
    async_copy.wait_group(0)
    cta_barrier()
    if WITH_GRADIENT:
        indices = start_keys(work, tiles)
    sees = write_loss(work, target + row, losses, sees_keys, KEEP_GRADIENT)
    if WITH_GRADIENT:
        cta_barrier()
        add_gradients(work, indexer, indices, sees, tiles, gradients)
        async_copy.wait_group(0)
