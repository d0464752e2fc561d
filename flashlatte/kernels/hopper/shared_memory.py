"""Offsets of tiles in shared memory, for instructions in inline PTX that Gluon does not have.

Gluon does not expose the addresses of its allocations, and they change with every other allocation. But it aligns tiles
with a 128-byte swizzle to 1,024 bytes, as WGMMA requires: tiles are searched for at these addresses.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.ptx import copies, threads
from flashlatte.runtime.gluon_compat import cta_barrier

# 256 KiB in steps of 1,024 bytes: more than the shared memory of a CTA.
_KIBIBYTES = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
_FIRST_KIBIBYTE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def find_tiles(tiles):
    """Find up to seven tiles [>= 8, >= 64] of two-byte elements with a 128-byte swizzle; pass the result to
    ``offset_of``.

    The function writes each tile and looks for the word of shared memory that changes. It traps if not exactly one word
    changes per tile, because then the assumed alignment is wrong. It overwrites the tiles, and must be called by four
    warps before others run.
    """
    kibibyte = gl.arange(0, 256, _KIBIBYTES)
    for tile in gl.static_range(len(tiles)):
        _fill_first_kibibyte(tiles[tile], 0.0)
    before = _first_words(kibibyte)
    # One byte per tile; the last byte counts the changed words.
    found = gl.zeros_like(kibibyte).to(gl.int64)
    for tile in gl.static_range(len(tiles)):
        _fill_first_kibibyte(tiles[tile], 1.0)
        words = _first_words(kibibyte)
        found += gl.where(words != before, (kibibyte.to(gl.int64) << (8 * tile)) + (1 << 56), 0)
        before = words
    found = gl.sum(found, 0)
    threads.trap_unless((found >> 56) == len(tiles))
    return found


@gluon.jit
def offset_of(TILE: gl.constexpr, found):
    """Offset in bytes from the start of shared memory of tile number TILE of ``find_tiles``."""
    return ((found >> (8 * TILE)) & 255).to(gl.int32) * 1024


@gluon.jit
def _fill_first_kibibyte(tile, value):
    """Write the first 1,024 bytes of a tile."""
    tile.slice(0, 8, dim=0).slice(0, 64, dim=1).store(gl.full([8, 64], value, tile.dtype, _FIRST_KIBIBYTE))


@gluon.jit
def _first_words(kibibyte):
    """The first word of each KiB, ordered after all earlier and before all later writes of the CTA."""
    cta_barrier()
    words = copies.load_shared_words(kibibyte * 1024)
    cta_barrier()
    return words
