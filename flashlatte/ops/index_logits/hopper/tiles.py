"""Tiles in shared memory, register layouts and barriers that both kernels share."""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashlatte.kernels.hopper.barriers import allocate_uninitialized_mbarriers, initialize_mbarriers

# Keys of a tile: the rows of a WGMMA.
KEYS = gl.constexpr(64)
# Maximum columns of a WGMMA; a column is a head of a query.
MAX_COLUMNS = gl.constexpr(256)


@gluon.constexpr_function
def scores_layout(columns):
    """Layout of scores [64 keys, columns] of four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@gluon.constexpr_function
def vectors_layout(head_dim, rank=2):
    """Layout of rows of ``head_dim`` e4m3 elements, for TMA and WGMMA."""
    return gl.NVMMASharedLayout(head_dim, 8, rank)


@gluon.constexpr_function
def scalars_layout(rank=1):
    """Layout of contiguous float32 scalars, for TMA."""
    return gl.NVMMASharedLayout(0, 32, rank)


class LogitsShared(NamedTuple):
    """Rings of queries and of keys, with their barriers."""

    q: Any  # [slots · consumers' tiles, columns, D]
    weights: Any  # [slots · consumers' tiles, columns, or more]
    q_full: Any
    q_empty: Any
    k: Any  # [slots, 64, D]
    k_scale: Any  # [slots, 64]
    k_full: Any
    k_empty: Any


@gluon.jit
def allocate_rings(
    Q_SLOTS: gl.constexpr,
    TILES: gl.constexpr,
    COLUMNS: gl.constexpr,
    WEIGHTS: gl.constexpr,
    SLOTS: gl.constexpr,
    KEY_TILES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Slots of queries, of TILES tiles with COLUMNS columns and WEIGHTS weights each, and SLOTS slots of keys, of
    KEY_TILES tiles each. ``initialize_rings`` initializes the mbarriers."""
    return LogitsShared(
        gl.allocate_shared_memory(gl.float8e4nv, [TILES * Q_SLOTS, COLUMNS, HEAD_DIM], vectors_layout(HEAD_DIM)),
        gl.allocate_shared_memory(gl.float32, [TILES * Q_SLOTS, WEIGHTS], scalars_layout()),
        allocate_uninitialized_mbarriers(Q_SLOTS),
        allocate_uninitialized_mbarriers(Q_SLOTS),
        gl.allocate_shared_memory(gl.float8e4nv, [SLOTS * KEY_TILES, KEYS, HEAD_DIM], vectors_layout(HEAD_DIM)),
        gl.allocate_shared_memory(gl.float32, [SLOTS * KEY_TILES, KEYS], scalars_layout()),
        allocate_uninitialized_mbarriers(SLOTS),
        allocate_uninitialized_mbarriers(SLOTS),
    )


@gluon.jit
def initialize_rings(shared, KEY_TILES: gl.constexpr):
    """Initialize the mbarriers, for slots of keys of KEY_TILES tiles. Both consumers read each slot."""
    initialize_mbarriers(shared.q_full, 1)
    initialize_mbarriers(shared.q_empty, 2)
    initialize_mbarriers(shared.k_full, KEY_TILES)
    initialize_mbarriers(shared.k_empty, 2)


@gluon.jit
def wait_full(ring, step, SLOTS: gl.constexpr):
    """Wait until slot ``step`` % SLOTS is full for step ``step``."""
    mbarrier.wait(ring.index(step % SLOTS), (step // SLOTS) & 1)


@gluon.jit
def wait_empty(ring, step, SLOTS: gl.constexpr):
    """Wait until slot ``step`` % SLOTS is empty; returns at once in its first use."""
    mbarrier.wait(ring.index(step % SLOTS), ((step // SLOTS) & 1) ^ 1)
