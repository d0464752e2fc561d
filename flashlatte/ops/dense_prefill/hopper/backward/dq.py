"""dQ, accumulated over the blocks of keys in float32 [heads, tokens, d_qk].

The consumers write a step's dQ to shared memory, and the producer adds it to the sums by TMA reductions. Columns are
permuted: a thread holds columns 2t and 2t + 1 of each eight, and stores its eight elements of 32 columns contiguously,
16 bytes at a time, so that eight threads have no bank conflicts. ``finish_kernel`` undoes the permutation.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.ptx import copies
from flashlatte.kernels.hopper.ptx.threads import broadcast_to_threads, one_per_thread
from flashlatte.ops.dense_prefill.hopper.backward.schedule import QUERIES, semaphore_value
from flashlatte.ops.dense_prefill.hopper.backward.state import MAIN
from flashlatte.runtime.gluon_compat import tma_add
from flashlatte.runtime.kernel_records import Int32, Pointer

# Columns that are permuted together, and of one TMA reduction: 128 bytes.
SUM_COLUMNS = gl.constexpr(32)


class QueryGradient(NamedTuple):
    """The sums of dQ, and in deterministic mode a semaphore per tile of queries that orders the additions.

    Attributes:
        sums: float32 [heads, total_q, d_qk]; for the main kernel a TMA descriptor of tiles [1, 64, SUM_COLUMNS].
        semaphores: int32 [heads, tiles_per_head], or None.
    """

    sums: Pointer
    semaphores: Pointer
    tiles_per_head: Int32


@gluon.jit
def stage_columns(staging, tile, rows):
    """Write [64 queries, columns] to shared memory, with zeros for rows from ``rows`` on, which are not part of the
    request."""
    COLUMNS: gl.constexpr = tile.shape[1]
    if rows < QUERIES:
        row = gl.arange(0, QUERIES, gl.SliceLayout(1, tile.type.layout))
        tile = gl.where((row < rows)[:, None], tile, 0.0)
    # [64, groups of 32, of 16, of 8, thread, adjacent column]
    tile = tile.reshape([QUERIES, COLUMNS // SUM_COLUMNS, 2, 2, 4, 2]).permute((0, 1, 4, 2, 3, 5))
    staging.store(tile.reshape([QUERIES, COLUMNS]))


@gluon.jit
def add_staged(dq, shared, head, token, HAS_ROPE: gl.constexpr):
    """Add the staged dQ to the rows from ``token`` on, and wait until the TMA reductions have read it."""
    _add_own(dq, shared.keys0, head, token, 0, HAS_ROPE)
    _add_own(dq, shared.keys1, head, token, 1, HAS_ROPE)
    copies.wait_stores_read()


@gluon.jit
def _add_own(dq, own, head, token, OWN: gl.constexpr, HAS_ROPE: gl.constexpr):
    for column in gl.static_range(0, 64, SUM_COLUMNS):
        tma_add(dq.sums, [head, token, OWN * 64 + column], own.dq_main.index(0).slice(column, SUM_COLUMNS, dim=1))
    if HAS_ROPE:
        tma_add(dq.sums, [head, token, MAIN + OWN * SUM_COLUMNS], own.dq_rope.index(0))


@gluon.jit
def _semaphore_address(dq, block, head, query):
    """Address, for each thread of the producer, of the semaphore of the tile of queries from ``query`` on."""
    tile = head * dq.tiles_per_head + block.q_slot + query // QUERIES
    return gl.full([128], 0, gl.int64, one_per_thread(128)) + (dq.semaphores + tile).to(gl.int64)


@gluon.jit
def wait_later_blocks(dq, block, head, query):
    """Wait until later blocks of keys have added to the tile."""
    value = broadcast_to_threads(0) + semaphore_value(block, query)
    address = _semaphore_address(dq, block, head, query)
    copies.semaphore_wait(address, value)


@gluon.jit
def signal_earlier_block(dq, block, head, query):
    """Allow the next block of keys to add to the tile, after the additions of this one have completed."""
    copies.semaphore_release(_semaphore_address(dq, block, head, query))
