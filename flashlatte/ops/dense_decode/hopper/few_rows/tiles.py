"""Shared memory of ``few_rows``, and how its three partitions pass it on.

A block of 64 keys is two *halves*: columns 0 to 255, and 256 to 511 with the rope. A step takes two blocks, whose four
halves have a tile each as float16. As bytes, half h of all that the CTA takes lies in slot h % 3 of the ring.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.barriers import FIRST_FREE
from flashlatte.kernels.hopper.mla_tiles import HALF, KEYS, ROPE, SWIZZLED, LatentTile
from flashlatte.kernels.hopper.two_consumers import mbarriers

# Query rows, and halves that the ring has room for: what fits.
ROWS = gl.constexpr(16)
SLOTS = gl.constexpr(3)

# Named barriers, the first of each. The tile of a half may be filled (attender to caster), and is filled (caster to
# attender); a slot of the ring may be filled (caster to loader). 11 in all, which is what there are.
TILE_EMPTY = gl.constexpr(FIRST_FREE)
TILE_FULL = gl.constexpr(FIRST_FREE + 4)
SLOT_EMPTY = gl.constexpr(FIRST_FREE + 8)
# Threads that meet there: caster and attender, or caster and loader.
TILE_MEETING = gl.constexpr(256)
SLOT_MEETING = gl.constexpr(160)

# Of scores [64, 16], and of halves of an output [256, 16].
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))

# Lines of 64 bytes: eight threads of the caster load two of them together.
_RING = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))
_P = gl.constexpr(gl.NVMMASharedLayout(32, 16, 2))


class Tiles(NamedTuple):
    """Tiles in shared memory: of float16 with an axis of 1 before theirs (``mla_tiles.Tiles``), and the ring."""

    q: LatentTile  # of 16 rows
    k0: LatentTile
    k1: LatentTile
    p: Any  # [1, 64, 16]
    ring: Any  # pairs of bytes [3, 64, 128]
    ring_ropes: Any  # [2, 64, 32], of blocks in turn
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
    return Tiles(
        _allocate(ROWS),
        _allocate(KEYS),
        _allocate(KEYS),
        gl.allocate_shared_memory(gl.float16, [1, KEYS, ROWS], _P),
        gl.allocate_shared_memory(gl.bfloat16, [SLOTS, KEYS, HALF // 2], _RING),
        gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, ROPE // 2], _RING),
        mbarriers(SLOTS),
    )
