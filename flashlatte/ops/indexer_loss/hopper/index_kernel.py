"""The index kernel: index logits of a token's selected keys, their divergence from the target, and the gradients.

A program has four warps and a token; two programs share an SM. Index keys are gathered twice, 64 a step and a step
ahead: for the logits, and for the gradients. In the second pass each warp stages 16 rows of the index keys' gradients
in shared memory and adds them to memory by TMA. Additions to memory are the limit: those of a step run during the
products of the next, and during the first pass of the other program.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from flashlatte.kernels.hopper.row_loads import LatentKeys
from flashlatte.ops.indexer_loss.hopper.gradients import IndexGradients, add_gradients
from flashlatte.ops.indexer_loss.hopper.index_tiles import IndexToken, allocate, load_q, start_keys
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
        KEEP_GRADIENT: the gradients of the logits replace them.
        WITH_GRADIENT: those of index_q, index_k and index_weights are computed too.
    """
    row = gl.program_id(0).to(gl.int64) * slots.width
    token = first_token + gl.program_id(0)
    of = IndexToken(
        token,
        slots.indices + token.to(gl.int64) * slots.indices_stride,
        gl.load(slots.ranges + slots.s_q + token),
        LatentKeys(indexer.k, indexer.k_stride),
        slots.s_kv,
        logits + row,
    )
    tiles = allocate(indexer.k.dtype.element_ty, WITH_GRADIENT)
    indices = start_keys(of, tiles)
    load_q(indexer, token, tiles.q)
    fence_async_shared()
    write_logits(of, indexer, indices, tiles)
    # The last copies, of no keys, and all logits have been written.
    async_copy.wait_group(0)
    cta_barrier()
    if WITH_GRADIENT:
        indices = start_keys(of, tiles)
    sees = write_loss(of, target + row, losses, sees_keys, KEEP_GRADIENT)
    if WITH_GRADIENT:
        cta_barrier()
        add_gradients(of, indexer, indices, sees, tiles, gradients)
        async_copy.wait_group(0)
