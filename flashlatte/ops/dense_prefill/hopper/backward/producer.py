"""The producer warpgroup: loads the block's keys and values, then tiles of queries and of dO, and adds the consumers'
dQ to its sums.

Whole tiles are loaded by TMA. The threads gather the other tiles, with zeros for rows of other requests and for keys
that are visible to no query. Zero rows are harmless (P is 1 or masked, dP and dS are 0), but the rows that they replace
may be NaN, and 0 · NaN is NaN.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from flashlatte.kernels.hopper import barriers
from flashlatte.ops.dense_prefill.hopper.backward import state
from flashlatte.ops.dense_prefill.hopper.backward.dq import add_staged, signal_earlier_block, wait_later_blocks
from flashlatte.ops.dense_prefill.hopper.backward.schedule import KEYS, QUERIES
from flashlatte.ops.dense_prefill.hopper.backward.state import MAIN, OWN_KEYS, ROPE, STAGES, V_DIM
from flashlatte.runtime.gluon_compat import cp_async, tma_load
from flashlatte.runtime.kernel_records import Int32, Int64, Pointer

# A thread copies 16 bytes at a time, eight adjacent threads the 128 bytes of a swizzled row.
_GATHER = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# Unit of strides: elements in 16 bytes.
ALIGN = gl.constexpr(8)
_VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


class TileSource(NamedTuple):
    """A tensor [tokens, heads, columns] to load tiles from.

    Attributes:
        start: the tensor, with strides in units of 16 bytes.
        main, rope: TMA descriptors of columns 0 to 127 and 128 to 191 of 64 rows of a head; rope is None if there are
            no such columns.
    """

    start: Pointer
    token_stride: Int64
    head_stride: Int64
    main: Pointer
    rope: Pointer


class BackwardInputs(NamedTuple):
    """Inputs of the producer. ``lse`` (in base 2) and ``delta``: float32 [heads, total_q]."""

    q: TileSource
    dout: TileSource
    k: TileSource
    v: TileSource
    lse: Pointer
    delta: Pointer
    total_q: Int32


@gluon.jit
def _gather(tile, source, head, token, begin, count, FIRST: gl.constexpr):
    """Copy rows ``begin`` to count - 1 from ``token`` on into a tile of 64 rows, with zeros for the others."""
    row = gl.arange(0, 64, gl.SliceLayout(1, _GATHER))
    column = gl.arange(0, 64, gl.SliceLayout(0, _GATHER))
    valid = (row >= begin) & (row < count)
    start = gl.where(valid, token + row, 0).to(gl.int64) * source.token_stride
    start += head.to(gl.int64) * source.head_stride
    for part in gl.static_range(tile.shape[1] // 64):
        pointers = source.start + (start * ALIGN)[:, None] + (FIRST + part * 64 + column)[None, :]
        cp_async(tile.slice(part * 64, 64, dim=1), pointers, mask=valid[:, None])


@gluon.jit
def _gather_wide(main, rope, source, head, token, begin, count, HAS_ROPE: gl.constexpr):
    _gather(main, source, head, token, begin, count, 0)
    if HAS_ROPE:
        _gather(rope, source, head, token, begin, count, MAIN)


@gluon.jit
def _gather_keys(own, k, v, head, token, begin, count, HAS_ROPE: gl.constexpr):
    _gather_wide(own.main.index(0), own.rope.index(0), k, head, token, begin, count, HAS_ROPE)
    _gather(own.v.index(0), v, head, token, begin, count, 0)


@gluon.jit
def _finish_gather():
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()


@gluon.jit
def _load_keys(k, v, shared, block, head, HAS_ROPE: gl.constexpr):
    full = shared.keys_full
    token = block.k_token
    begin = block.below
    count = block.keys
    keys0 = shared.keys0
    keys1 = shared.keys1
    if (begin <= 0) & (count >= KEYS):
        mbarrier.expect(full, KEYS * (MAIN + (ROPE if HAS_ROPE else 0) + V_DIM) * 2)
        tma_load(k.main, [head, token, 0], full, keys0.main.index(0))
        tma_load(k.main, [head, token + OWN_KEYS, 0], full, keys1.main.index(0))
        if HAS_ROPE:
            tma_load(k.rope, [head, token, MAIN], full, keys0.rope.index(0))
            tma_load(k.rope, [head, token + OWN_KEYS, MAIN], full, keys1.rope.index(0))
        tma_load(v.main, [head, token, 0], full, keys0.v.index(0))
        tma_load(v.main, [head, token + OWN_KEYS, 0], full, keys1.v.index(0))
    else:
        _gather_keys(keys0, k, v, head, token, begin, count, HAS_ROPE)
        _gather_keys(keys1, k, v, head, token + OWN_KEYS, begin - OWN_KEYS, count - OWN_KEYS, HAS_ROPE)
        _finish_gather()
        mbarrier.arrive(full, count=1)


@gluon.jit
def _tile(block, kv_head, group, step):
    """The head and the first query of a step."""
    return kv_head * group + step // block.tiles, block.first_query + step % block.tiles * QUERIES


@gluon.jit
def _load_queries(inputs, block, kv_head, group, step, shared, HAS_ROPE: gl.constexpr):
    q = inputs.q
    head, query = _tile(block, kv_head, group, step)
    stage = step % STAGES
    token = block.q_token + query
    count = block.queries - query
    position = head.to(gl.int64) * inputs.total_q + token
    row = gl.arange(0, QUERIES, _VECTOR)
    row_lse = gl.load(inputs.lse + position + row, mask=row < count, other=0.0)
    row_delta = gl.load(inputs.delta + position + row, mask=row < count, other=0.0)
    if step >= STAGES:
        barriers.wait_at(state.STAGE_EMPTY + stage, barriers.ALL_THREADS)
    full = shared.stage_full.index(stage)
    main = shared.q_main.index(stage)
    rope = shared.q_rope.index(stage)
    if count >= QUERIES:
        mbarrier.expect(full, QUERIES * (MAIN + (ROPE if HAS_ROPE else 0)) * 2)
        tma_load(q.main, [head, token, 0], full, main)
        if HAS_ROPE:
            tma_load(q.rope, [head, token, MAIN], full, rope)
    else:
        _gather_wide(main, rope, q, head, token, 0, count, HAS_ROPE)
        _finish_gather()
        mbarrier.arrive(full, count=1)
    shared.lse.index(stage).store(row_lse)
    shared.delta.index(stage).store(row_delta)
    mbarrier.arrive(full, count=1)


@gluon.jit
def _load_dout(dout, block, kv_head, group, step, shared):
    head, query = _tile(block, kv_head, group, step)
    token = block.q_token + query
    count = block.queries - query
    tile = shared.dout.index(0)
    if step > 0:
        barriers.wait_at(state.DOUT_EMPTY, barriers.ALL_THREADS)
    if count >= QUERIES:
        mbarrier.expect(shared.dout_full, QUERIES * V_DIM * 2)
        tma_load(dout.main, [head, token, 0], shared.dout_full, tile)
    else:
        _gather(tile, dout, head, token, 0, count, 0)
        _finish_gather()
        mbarrier.arrive(shared.dout_full, count=1)


@gluon.jit
def _add_dq(dq, block, kv_head, group, step, steps, shared, HAS_ROPE: gl.constexpr):
    head, query = _tile(block, kv_head, group, step)
    if dq.semaphores is not None:
        wait_later_blocks(dq, block, head, query)
    barriers.wait_at(state.DQ_FULL, barriers.ALL_THREADS)
    add_staged(dq, shared, head, block.q_token + query, HAS_ROPE)
    if step + 1 < steps:
        barriers.arrive_at(state.DQ_EMPTY, barriers.ALL_THREADS)
    if dq.semaphores is not None:
        signal_earlier_block(dq, block, head, query)


@gluon.jit
def produce(inputs, dq, block, kv_head, group, shared, HAS_ROPE: gl.constexpr):
    steps = block.tiles * group
    if steps > 0:
        _load_keys(inputs.k, inputs.v, shared, block, kv_head, HAS_ROPE)
    # In the order in which the consumers release the buffers in a step: dO, queries, dQ.
    for step in range(-STAGES, steps):
        if (step >= -1) & (step + 1 < steps):
            _load_dout(inputs.dout, block, kv_head, group, step + 1, shared)
        if step + STAGES < steps:
            _load_queries(inputs, block, kv_head, group, step + STAGES, shared, HAS_ROPE)
        if step >= 0:
            _add_dq(dq, block, kv_head, group, step, steps, shared, HAS_ROPE)
