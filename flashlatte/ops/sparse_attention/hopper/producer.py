"""The producer of the queries kernel: loads q and dout of a block of heads once, and gathers tiles of keys.

It refills each quarter of the keys as soon as a consumer releases it, in the order 0, 2, 1, 3.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from flashlatte.kernels.hopper.barriers import PAIR_THREADS, wait
from flashlatte.kernels.hopper.mla_tiles import HALF, LATENT
from flashlatte.kernels.hopper.row_loads import GATHERED_ROWS, copy_columns, gathered_keys, load_columns
from flashlatte.kernels.triton.selections import first_index
from flashlatte.ops.sparse_attention.hopper.state import BOX, HEADS, KEYS
from flashlatte.ops.sparse_attention.hopper.tiles import (
    K_QUARTER0_EMPTY,
    K_QUARTER1_EMPTY,
    K_QUARTER2_EMPTY,
    K_QUARTER3_EMPTY,
    QUARTER,
)


@gluon.jit
def _load_rows(rows, token, head, tiles, HAS_ROPE: gl.constexpr):
    q = tiles.q
    mbarrier.expect(tiles.q_full, HEADS * (LATENT + (BOX if HAS_ROPE else 0)) * 2)
    load_columns(rows.q, token, head, 0, tiles.q_full, q.left.index(0))
    load_columns(rows.q, token, head, HALF, tiles.q_full, q.right.index(0))
    if HAS_ROPE:
        load_columns(rows.q, token, head, LATENT, tiles.q_full, q.rope.index(0))
    mbarrier.expect(tiles.dout_full, HEADS * LATENT * 2)
    load_columns(rows.dout, token, head, 0, tiles.dout_full, tiles.dout.left.index(0))
    load_columns(rows.dout, token, head, HALF, tiles.dout_full, tiles.dout.right.index(0))


@gluon.jit
def _load_indices(row, first, count):
    slot = first + gl.arange(0, KEYS, GATHERED_ROWS)
    return gl.load(row + slot, mask=slot < count, other=-1)


@gluon.jit
def _copy_quarter(gathered, NUMBER: gl.constexpr, half, full):
    copy_columns(gathered, NUMBER * QUARTER, half.index(0).slice(NUMBER % 2 * QUARTER, QUARTER, dim=1))
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def produce(rows, keys, selections, token, head, count, steps, tiles, HAS_ROPE: gl.constexpr):
    k = tiles.k
    full = tiles.k_full
    _load_rows(rows, token, head, tiles, HAS_ROPE)
    row = first_index(selections, token)
    indices = _load_indices(row, 0, count)
    for step in range(steps):
        gathered = gathered_keys(indices, keys, selections.s_kv)
        wait(K_QUARTER0_EMPTY, PAIR_THREADS)
        _copy_quarter(gathered, 0, k.left, full.quarter0)
        tiles.mask.store(gathered.valid.to(gl.int32))
        mbarrier.arrive(full.mask, count=1)
        wait(K_QUARTER2_EMPTY, PAIR_THREADS)
        _copy_quarter(gathered, 2, k.right, full.quarter2)
        # Indices come from HBM, so the next step's are loaded ahead.
        indices = _load_indices(row, (step + 1) * KEYS, count)
        wait(K_QUARTER1_EMPTY, PAIR_THREADS)
        _copy_quarter(gathered, 1, k.left, full.quarter1)
        wait(K_QUARTER3_EMPTY, PAIR_THREADS)
        if HAS_ROPE:
            copy_columns(gathered, LATENT, k.rope.index(0))
        _copy_quarter(gathered, 3, k.right, full.quarter3)
