"""Shared memory and barriers of ``few_rows``.

A block of 64 keys consists of two *halves*: columns 0 to 255, and 256 to 511 with the rope. A step processes two
blocks, whose four halves have a float16 tile each. The bytes of half h, counted over all work of the CTA, are loaded
into slot h % 3 of the ring.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.barriers import FIRST_FREE, allocate_mbarriers
from flashlatte.kernels.hopper.mla_tiles import HALF, KEYS, ROPE, SWIZZLED, LatentTile

# Query rows, and slots of the ring: as many as fit in shared memory.
ROWS = gl.constexpr(16)
SLOTS = gl.constexpr(3)

# First named barriers of each kind: the tile of a half is empty (consumer to caster) or full (caster to consumer); a
# slot of the ring is empty (caster to loader). 11 in total, which is all that are available.
TILE_EMPTY = gl.constexpr(FIRST_FREE)
TILE_FULL = gl.constexpr(FIRST_FREE + 4)
SLOT_EMPTY = gl.constexpr(FIRST_FREE + 8)
# Threads of these barriers: caster and consumer, or caster and loader.
TILE_BARRIER_THREADS = gl.constexpr(256)
SLOT_BARRIER_THREADS = gl.constexpr(160)

# Layout of scores [64, 16] and of halves of the output [256, 16].
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))

# 64-byte swizzle: eight threads of the caster load two rows of 64 bytes together.
_RING = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))
_P = gl.constexpr(gl.NVMMASharedLayout(32, 16, 2))


class FewRowsTiles(NamedTuple):
    """Tiles in shared memory: float16 tiles with a leading axis of 1 (``mla_tiles.MlaTiles``), and the ring."""

    q: LatentTile  # of 16 rows
    k0: LatentTile
    k1: LatentTile
    p: Any  # [1, 64, 16]
    ring: Any  # pairs of bytes [3, 64, 128]
    ring_ropes: Any  # [2, 64, 32], of alternate blocks
    ring_full: Any  # mbarriers of the slots


@gluon.jit
def _allocate(TILE_ROWS: gl.constexpr):
    return LatentTile(
        gl.allocate_shared_memory(gl.float16, [1, TILE_ROWS, HALF], SWIZZLED),
        gl.allocate_shared_memory(gl.float16, [1, TILE_ROWS, HALF], SWIZZLED),
        gl.allocate_shared_memory(gl.float16, [1, TILE_ROWS, ROPE], SWIZZLED),
    )


@gluon.jit
def allocate():
    return FewRowsTiles(
        _allocate(ROWS),
        _allocate(KEYS),
        _allocate(KEYS),
        gl.allocate_shared_memory(gl.float16, [1, KEYS, ROWS], _P),
        gl.allocate_shared_memory(gl.bfloat16, [SLOTS, KEYS, HALF // 2], _RING),
        gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, ROPE // 2], _RING),
        allocate_mbarriers(SLOTS),
    )
