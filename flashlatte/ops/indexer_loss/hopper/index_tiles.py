"""Tiles of the index kernel in shared memory, and the stream of a token's selected index keys through them."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from flashlatte.kernels.hopper.mla_tiles import COPY, KEYS, ROWS, SCORES, SWIZZLED
from flashlatte.kernels.hopper.row_loads import GATHERED_ROWS, copy_columns, gathered_keys
from flashlatte.kernels.hopper.shared_memory import find_tiles, offset_of
from flashlatte.ops.indexer_loss.hopper.head_sums import WARPS, allocate_sums
from flashlatte.runtime.gluon_compat import cta_barrier

# Elements of an index key.
INDEX_DIM = gl.constexpr(128)
# Eight rows of 1,024 bytes in a box; 64 staged rows of 544 bytes are 34 boxes.
_STAGED_BOXES = gl.constexpr(34)


class IndexTiles(NamedTuple):
    """Shared memory."""

    q: Any  # [64, 128]
    k: Any  # [2, 64, 128]
    weighted: Any  # [64 heads, 64 keys]: weights of the heads whose score is positive
    sums: Any  # float32 [1, 4, 64]: index logits, summed over the heads of each warp
    staged: Any  # offset of the staged rows, in bytes from the start of shared memory


class IndexWork(NamedTuple):
    """The token that a program processes, and pointers to its rows.

    Attributes:
        indices: the token's list; the first ``count`` indices are used.
        keys: ``row_loads.LatentKeys`` of index_k [s_kv, 128].
        logits: float32 [width], of the token's slots.
    """

    token: Any
    indices: Any
    count: Any
    keys: Any
    s_kv: Any
    logits: Any


@gluon.jit
def allocate(DTYPE: gl.constexpr, WITH_GRADIENT: gl.constexpr):
    q = gl.allocate_shared_memory(DTYPE, [ROWS, INDEX_DIM], SWIZZLED)
    k = gl.allocate_shared_memory(DTYPE, [2, KEYS, INDEX_DIM], SWIZZLED)
    sums = allocate_sums(1, WARPS)
    if WITH_GRADIENT:
        weighted = gl.allocate_shared_memory(DTYPE, [ROWS, KEYS], SWIZZLED)
        staged = gl.allocate_shared_memory(DTYPE, [_STAGED_BOXES, 8, 64], SWIZZLED)
        return IndexTiles(q, k, weighted, sums, offset_of(0, find_tiles((staged.index(0),))))
    else:
        return IndexTiles(q, k, q, sums, 0)


@gluon.jit
def load_q(indexer, token, tile):
    """Store index_q [heads, 128] of a token in ``tile`` [64, 128], with 0 for heads after the last."""
    head = gl.arange(0, ROWS, GATHERED_ROWS)
    offsets = (token.to(gl.int64) * indexer.stride_token + head * indexer.stride_head) * indexer.align
    columns = gl.arange(0, INDEX_DIM, gl.SliceLayout(0, COPY))
    tile.store(gl.load(indexer.q + offsets[:, None] + columns[None, :], mask=(head < indexer.h_i)[:, None], other=0))


@gluon.jit
def load_weights(indexer, token, sees, LAYOUT: gl.constexpr):
    """index_weights of a token, float32 [64]: 0 for heads after the last, and for all heads if not ``sees``."""
    head = gl.arange(0, ROWS, LAYOUT)
    pointers = indexer.weights + token.to(gl.int64) * indexer.weights_stride + head
    return gl.load(pointers, mask=sees & (head < indexer.h_i), other=0).to(gl.float32)


@gluon.jit
def load_indices(work, step, LAYOUT: gl.constexpr):
    """The indices [64] at the slots of a step, -1 after the last one."""
    slot = step * KEYS + gl.arange(0, KEYS, LAYOUT)
    return gl.load(work.indices + slot, mask=slot < work.count, other=-1)


@gluon.jit
def is_valid(work, indices):
    return (indices >= 0) & (indices < work.s_kv)


@gluon.jit
def start_keys(work, tiles):
    """Start the copies of the first tile of keys. Returns the indices of the second."""
    _copy(work, load_indices(work, 0, GATHERED_ROWS), 0, tiles)
    return load_indices(work, 1, GATHERED_ROWS)


@gluon.jit
def next_keys(work, step, indices, tiles):
    """Start the copies of the keys of step + 1, given their ``indices``. Returns the indices of step + 2, which are
    loaded from HBM meanwhile.

    All warps must have finished step - 1, whose tile is overwritten.
    """
    _copy(work, indices, step + 1, tiles)
    return load_indices(work, step + 2, GATHERED_ROWS)


@gluon.jit
def _copy(work, indices, step, tiles):
    copy_columns(gathered_keys(indices, work.keys, work.s_kv), 0, tiles.k.index(step & 1))
    async_copy.commit_group()


@gluon.jit
def scores_of(tiles, step, index_scale):
    """Wait for the keys of a step, and return their scores [64 heads, 64 keys]."""
    async_copy.wait_group(1)
    cta_barrier()
    unused = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    k = tiles.k.index(step & 1)
    scores = warpgroup_mma(tiles.q, k.permute((1, 0)), unused, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores]) * index_scale
