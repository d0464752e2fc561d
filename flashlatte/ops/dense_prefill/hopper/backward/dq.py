"""dQ, summed over the blocks of keys in float32, [heads, tokens, d_qk].

The consumers put a step's dQ in shared memory, and the producer has the copy engine add it to the sums. Columns are in
an order of their own: a thread has columns 2t and 2t + 1 of each eight, and puts the eight numbers that it has of
thirty-two columns side by side, so that it stores 16 bytes at a time, eight threads without a bank conflict.
``finish_kernel`` undoes the order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.ptx import memory
from flashlatte.kernels.hopper.ptx.threads import each_thread, one_each
from flashlatte.ops.dense_prefill.hopper.backward.schedule import QUERIES, turn_of
from flashlatte.ops.dense_prefill.hopper.backward.state import MAIN
from flashlatte.runtime.gluon_compat import tma_add

# Columns that are in an order of their own, and that the copy engine adds at a time: 128 bytes.
SUM_COLUMNS = gl.constexpr(32)


class QueryGradient(NamedTuple):
    """The sums, and in deterministic mode whose turn it is to add, for each tile of queries."""

    sums: Any  # of tiles [1, 64, SUM_COLUMNS]
    turns: Any
    turns_per_head: Any  # tiles of a head


@gluon.jit
def stage_columns(staging, tile, rows):
    """Put [64 queries, columns] in shared memory, with zeros for rows from ``rows`` on: they are not the request's."""
    COLUMNS: gl.constexpr = tile.shape[1]
    if rows < QUERIES:
        row = gl.arange(0, QUERIES, gl.SliceLayout(1, tile.type.layout))
        tile = gl.where((row < rows)[:, None], tile, 0.0)
    # [64, thirty-twos, sixteen, eight, thread, neighbour]
    tile = tile.reshape([QUERIES, COLUMNS // SUM_COLUMNS, 2, 2, 4, 2]).permute((0, 1, 4, 2, 3, 5))
    staging.store(tile.reshape([QUERIES, COLUMNS]))


@gluon.jit
def add_staged(dq, shared, head, token, HAS_ROPE: gl.constexpr):
    """Add what the consumers have staged to the rows from ``token`` on, and wait until the copy engine has read it."""
    _add_own(dq, shared.keys0, head, token, 0, HAS_ROPE)
    _add_own(dq, shared.keys1, head, token, 1, HAS_ROPE)
    memory.stores_read()


@gluon.jit
def _add_own(dq, own, head, token, OWN: gl.constexpr, HAS_ROPE: gl.constexpr):
    for column in gl.static_range(0, 64, SUM_COLUMNS):
        tma_add(dq.sums, [head, token, OWN * 64 + column], own.dq_main.index(0).slice(column, SUM_COLUMNS, dim=1))
    if HAS_ROPE:
        tma_add(dq.sums, [head, token, MAIN + OWN * SUM_COLUMNS], own.dq_rope.index(0))


@gluon.jit
def _turn_address(dq, block, head, query):
    """Where each thread of the producer finds whose turn it is at the tile of queries from ``query`` on."""
    tile = head * dq.turns_per_head + block.q_slot + query // QUERIES
    return gl.full([128], 0, gl.int64, one_each(128)) + (dq.turns + tile).to(gl.int64)


@gluon.jit
def take_turn(dq, block, head, query):
    """Wait until the later blocks have added to the tile."""
    turn = each_thread(0) + turn_of(block, query)
    address = _turn_address(dq, block, head, query)
    memory.take_turn(address, turn)


@gluon.jit
def pass_turn(dq, block, head, query):
    """Let the next block add to the tile, once the sums have what this one added."""
    memory.pass_turn(_turn_address(dq, block, head, query))
