"""The gradient kernel: gradients of index_q, index_weights and the selected index keys, of a query token.

With s = index_scale · index_q · index_k, r = 1 where s > 0 and G the gradients of the index logits:

    d index_q       = index_scale · index_weights · (G r) index_k       G r in registers
    d index_k[j]   += index_scale · G[j] · (r index_weights)ᵀ index_q   r index_weights in shared memory
    d index_weights = Σ_j G relu(s)

A program has four warps and a token; two programs share an SM. A step has 64 keys, which are gathered a step ahead.
Each warp stages 16 rows of the index keys' gradients in shared memory and adds them to memory by TMA. Additions to
memory are the limit: those of a step run during the products of the next.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlatte.kernels.hopper.mla_tiles import COPY, KEYS, ROWS, SCORE_COLS, SCORE_ROWS, SCORES, SWIZZLED
from flashlatte.kernels.hopper.ptx.copies import wait_stores_read
from flashlatte.kernels.hopper.ptx.staged_rows import STAGED_COLUMNS, row_of_thread, send_rows, stage_rows
from flashlatte.kernels.hopper.ptx.threads import warp_sync
from flashlatte.kernels.hopper.row_loads import GATHERED_ROWS, LatentKeys, copy_columns, gathered_keys
from flashlatte.kernels.hopper.shared_memory import find_tiles, offset_of
from flashlatte.ops.indexer_loss.seen_keys import IndexerRows, SlotRanges
from flashlatte.runtime.gluon_compat import cta_barrier
from flashlatte.runtime.triton_kernel import gluon_kernel

# Elements of an index key: the columns that are staged at a time.
INDEX_DIM = gl.constexpr(128)
_GRADIENT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_GRADIENT_ROWS = gl.constexpr(gl.SliceLayout(1, _GRADIENT))
_GRADIENT_COLS = gl.constexpr(gl.SliceLayout(0, _GRADIENT))
_OPERAND = gl.constexpr(gl.DotOperandLayout(0, _GRADIENT, 2))
# Eight rows of 1,024 bytes in a box; 64 staged rows of 544 bytes are 34 boxes.
_STAGED_BOXES = gl.constexpr(34)


class IndexGradientTiles(NamedTuple):
    """Shared memory."""

    q: Any  # [64, 128]
    k: Any  # [2, 64, 128]
    weighted: Any  # [64 heads, 64 keys]: r index_weights
    staged: Any  # offset of the staged rows, in bytes from the start of shared memory


@gluon.jit
def _allocate(DTYPE: gl.constexpr):
    q = gl.allocate_shared_memory(DTYPE, [ROWS, INDEX_DIM], SWIZZLED)
    k = gl.allocate_shared_memory(DTYPE, [2, KEYS, INDEX_DIM], SWIZZLED)
    weighted = gl.allocate_shared_memory(DTYPE, [ROWS, KEYS], SWIZZLED)
    staged = gl.allocate_shared_memory(DTYPE, [_STAGED_BOXES, 8, 64], SWIZZLED)
    return IndexGradientTiles(q, k, weighted, offset_of(0, find_tiles((staged.index(0),))))


@gluon.jit
def _load_q(indexer, token, sees, tile):
    """Store index_q of the token in its tile: 0 for heads after the last, and for a token that sees no key, whose
    index_q may be NaN."""
    head = gl.arange(0, ROWS, GATHERED_ROWS)
    offsets = (token.to(gl.int64) * indexer.stride_token + head * indexer.stride_head) * indexer.align
    columns = gl.arange(0, INDEX_DIM, gl.SliceLayout(0, COPY))
    pointers = indexer.q + offsets[:, None] + columns[None, :]
    tile.store(gl.load(pointers, mask=(sees & (head < indexer.h_i))[:, None], other=0))


@gluon.jit
def _weights(indexer, token, sees, LAYOUT: gl.constexpr):
    head = gl.arange(0, ROWS, LAYOUT)
    pointers = indexer.weights + token.to(gl.int64) * indexer.weights_stride + head
    return gl.load(pointers, mask=sees & (head < indexer.h_i), other=0).to(gl.float32)


@gluon.jit
def _load_keys(list_of_token, first, count, LAYOUT: gl.constexpr):
    slot = first + gl.arange(0, KEYS, LAYOUT)
    return gl.load(list_of_token + slot, mask=slot < count, other=-1)


@gluon.jit
def _load_gradients(d_logits, first, count, LAYOUT: gl.constexpr):
    """G of a tile: 0 after the last slot, and for keys that are not valid."""
    slot = first + gl.arange(0, KEYS, LAYOUT)
    return gl.load(d_logits + slot, mask=slot < count, other=0.0)


@gluon.jit
def _targets(list_of_token, first, count, s_kv, d_index_k):
    """For each thread, the row that it sends of a tile, whether it sends one, and a pointer to where."""
    row = row_of_thread()
    slot = first + row
    sends = (row >= 0) & (slot < count)
    index = gl.load(list_of_token + slot, mask=sends, other=-1)
    sends = sends & (index >= 0) & (index < s_kv)
    return row, sends, d_index_k + gl.where(sends, index, 0).to(gl.int64) * INDEX_DIM


@gluon_kernel
def index_gradient_kernel(
    slots: SlotRanges,
    indexer: IndexerRows,
    first_token: gl.int32,
    d_logits,
    sees_keys,
    d_index_q,
    d_index_k,
    d_index_weights,
):
    """A program for each token from ``first_token`` on.

    Args:
        d_logits: float32 [tokens, width].
        d_index_k: float32 [s_kv, 128], added to.
    """
    token = first_token + gl.program_id(0)
    sees = gl.load(sees_keys + token) != 0
    count = gl.where(sees, gl.load(slots.ranges + slots.s_q + token), 0)
    list_of_token = slots.indices + token.to(gl.int64) * slots.indices_stride
    d_logits += gl.program_id(0).to(gl.int64) * slots.width
    keys = LatentKeys(indexer.k, indexer.k_stride)
    tiles = _allocate(indexer.k.dtype.element_ty)

    gathered = gathered_keys(_load_keys(list_of_token, 0, count, GATHERED_ROWS), keys, slots.s_kv)
    copy_columns(gathered, 0, tiles.k.index(0))
    async_copy.commit_group()
    indices = _load_keys(list_of_token, KEYS, count, GATHERED_ROWS)
    _load_q(indexer, token, sees, tiles.q)
    fence_async_shared()
    weight = _weights(indexer, token, sees, SCORE_ROWS)

    unused_scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    unused_keys = gl.zeros([KEYS, INDEX_DIM], gl.float32, _GRADIENT)
    d_q = gl.zeros([ROWS, INDEX_DIM], gl.float32, _GRADIENT)
    d_weight = gl.zeros([ROWS], gl.float32, SCORE_ROWS)
    for step in range((count + KEYS - 1) // KEYS):
        first = step * KEYS
        k = tiles.k.index(step & 1)
        # Before this, all warps have left the step that read the tile.
        copy_columns(gathered_keys(indices, keys, slots.s_kv), 0, tiles.k.index((step + 1) & 1))
        async_copy.commit_group()
        indices = _load_keys(list_of_token, first + 2 * KEYS, count, GATHERED_ROWS)
        gradient = _load_gradients(d_logits, first, count, SCORE_COLS)
        gradient_of_row = _load_gradients(d_logits, first, count, _GRADIENT_ROWS)
        row, sends, target = _targets(list_of_token, first, count, slots.s_kv, d_index_k)
        async_copy.wait_group(1)
        cta_barrier()
        scores = warpgroup_mma(tiles.q, k.permute((1, 0)), unused_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores]) * indexer.index_scale

        of_scores = gl.zeros_like(scores) + gradient[None, :]
        weighted = gl.zeros_like(scores) + weight[:, None]
        if indexer.use_relu:
            of_scores = gl.where(scores > 0, of_scores, 0.0)
            weighted = gl.where(scores > 0, weighted, 0.0)
        tiles.weighted.store(weighted.to(tiles.weighted.dtype))
        fence_async_shared()
        operand = gl.convert_layout(of_scores.to(k.dtype), _OPERAND, assert_trivial=True)
        d_q = warpgroup_mma(operand, k, d_q, is_async=True)
        cta_barrier()
        d_k = warpgroup_mma(tiles.weighted.permute((1, 0)), tiles.q, unused_keys, use_acc=False, is_async=True)
        d_weight += gl.sum(of_scores * scores, axis=1)
        # The rows of the step before.
        wait_stores_read()
        warp_sync()
        d_q, d_k = warpgroup_mma_wait(0, deps=[d_q, d_k])
        stage_rows(d_k * (gradient_of_row * indexer.index_scale)[:, None], tiles.staged, 0)
        fence_async_shared()
        warp_sync()
        send_rows(target, tiles.staged, row, sends, STAGED_COLUMNS, True)
        cta_barrier()
    async_copy.wait_group(0)

    head = gl.arange(0, ROWS, _GRADIENT_ROWS)
    d_q *= (_weights(indexer, token, sees, _GRADIENT_ROWS) * indexer.index_scale)[:, None]
    first_row = token.to(gl.int64) * indexer.h_i
    pointers = (d_index_q + (first_row + head) * INDEX_DIM)[:, None] + gl.arange(0, INDEX_DIM, _GRADIENT_COLS)[None, :]
    gl.store(pointers, d_q.to(d_index_q.dtype.element_ty), mask=(head < indexer.h_i)[:, None])
    head_of_weight = gl.arange(0, ROWS, SCORE_ROWS)
    gl.store(d_index_weights + first_row + head_of_weight, d_weight, mask=head_of_weight < indexer.h_i)
    wait_stores_read()
