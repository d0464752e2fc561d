"""Where tiles lie in shared memory, for instructions that Gluon lacks and inline PTX gives.

Gluon keeps the addresses of its allocations to itself, and they move when anything is allocated that was not before.
But it aligns tiles that are swizzled by 128 bytes to 1,024 bytes, as WGMMA needs them: each is looked for at those
places.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.ptx import memory, threads
from flashlatte.runtime.gluon_compat import cta_barrier

# 256 KiB in steps of 1,024 bytes are more than a program may have.
_PLACES = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
_CORNER = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def find_tiles(tiles):
    """Find up to seven tiles [>= 8, >= 64] of two-byte numbers, swizzled by 128 bytes, for ``offset_of``.

    A tile lies where a word of shared memory changes when the tile is written. Where that is not one word for each
    tile, tiles lie otherwise than this supposes, and the program stops. Overwrites the tiles. For a program of four
    warps, before others run.
    """
    place = gl.arange(0, 256, _PLACES)
    for tile in gl.static_range(len(tiles)):
        _fill_corner(tiles[tile], 0.0)
    before = _first_words(place)
    # A byte for each tile, and the last one for how many words have changed.
    found = gl.zeros_like(place).to(gl.int64)
    for tile in gl.static_range(len(tiles)):
        _fill_corner(tiles[tile], 1.0)
        words = _first_words(place)
        found += gl.where(words != before, (place.to(gl.int64) << (8 * tile)) + (1 << 56), 0)
        before = words
    found = gl.sum(found, 0)
    threads.stop_unless((found >> 56) == len(tiles))
    return found


@gluon.jit
def offset_of(TILE: gl.constexpr, found):
    """Bytes from the start of shared memory to a tile, given by its position among those of ``find_tiles``."""
    return ((found >> (8 * TILE)) & 255).to(gl.int32) * 1024


@gluon.jit
def _fill_corner(tile, value):
    """Write the tile's first 1,024 bytes."""
    tile.slice(0, 8, dim=0).slice(0, 64, dim=1).store(gl.full([8, 64], value, tile.dtype, _CORNER))


@gluon.jit
def _first_words(place):
    """The first word at each place, after all that is written before this and before all that is written after."""
    cta_barrier()
    words = memory.shared_words(place * 1024)
    cta_barrier()
    return words
