"""Two CTAs of a cluster that need the same keys: each dequantizes half of every block's tokens, for both.

Their blocks have the same tokens in different places: a CTA's own 32 are rows 0 to 31 of its tiles, those that its peer
has dequantized rows 32 to 63. When a warp of the producer has stored its 8 tokens of a half, it has the copy engine
send them to the peer through DSMEM, where an mbarrier counts the bytes. A half is empty when the consumers of both CTAs
have read it.

Mbarriers stand for the named barriers of empty and full halves; they are the tail of the shared memory, behind Triton's
(``ptx.clusters``). The halves of both blocks lie side by side, in one allocation at the start of shared memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.barriers import FIRST_FREE
from flashlatte.kernels.hopper.ptx import clusters as ptx
from flashlatte.kernels.hopper.ptx.threads import stop_unless
from flashlatte.kernels.hopper.shared_memory import find_tiles, offset_of

# Shared memory behind Triton's: eight mbarriers.
TAIL_BYTES = gl.constexpr(64)
# Tokens of a block that a CTA dequantizes.
OWN = gl.constexpr(32)
# Order of the halves in their allocation.
K0_LEFT = gl.constexpr(0)
K0_RIGHT = gl.constexpr(1)
K1_LEFT = gl.constexpr(2)
K1_RIGHT = gl.constexpr(3)

TILE_BYTES = gl.constexpr(32768)
# Bytes of 64 columns of a tile, 128 in each of 64 rows; where the peer's rows begin among them; and of a warp's 8 rows.
COLUMNS_BYTES = gl.constexpr(8192)
PEER_ROWS = gl.constexpr(4096)
WARP_ROWS = gl.constexpr(1024)
# Warps that read a half.
_READERS = 2 * 4
# Arrivals at the mbarriers. Empty: a warp of each consumer that reads the half, of both CTAs. Full: whoever says how
# many bytes will come.
_COUNTS = gl.constexpr([_READERS] * 4 + [1] * 4)


class Cluster(NamedTuple):
    """Addresses of the shared memory and of the mbarriers, of this CTA and of its peer."""

    own: Any
    peer: Any
    barriers: Any
    peer_barriers: Any


@gluon.constexpr_function
def _offset(BARRIER):
    """Of the mbarrier that stands for a named barrier."""
    return 8 * (BARRIER - FIRST_FREE)


@gluon.jit
def find_peer(first_half):
    """This CTA's cluster, with its mbarriers ready. ``first_half``: of block 0, with which the allocation begins.

    The allocation is the largest one, and Triton places that at the start of shared memory. The program stops where it
    is not there: an address found at run time would take registers of the producer, which has none to spare.
    """
    stop_unless(offset_of(0, find_tiles((first_half.index(0),))) == 0)
    cluster = Cluster(
        ptx.shared_address(0, False),
        ptx.shared_address(0, True),
        ptx.shared_address(TAIL_BYTES, False),
        ptx.shared_address(TAIL_BYTES, True),
    )
    ptx.init_mbarriers(cluster.barriers, _COUNTS)
    return cluster


@gluon.jit
def wait(BARRIER: gl.constexpr, cluster, phase):
    """Wait for a half: until both CTAs have read it, or until the peer's tokens have come."""
    ptx.wait_mbarrier(cluster.barriers, _offset(BARRIER), phase)


@gluon.jit
def release(EMPTY: gl.constexpr, cluster):
    """A warp has read a half: both producers may fill it."""
    ptx.arrive_both(cluster.barriers, cluster.peer_barriers, _offset(EMPTY))


@gluon.jit
def expect(FULL: gl.constexpr, PIECES: gl.constexpr, cluster):
    """Say how much of a half will come from the peer, 64 columns a piece."""
    ptx.expect_bytes(cluster.barriers, _offset(FULL), PIECES * 4 * WARP_ROWS)


@gluon.jit
def addresses(cluster, LAYOUT: gl.constexpr):
    """Addresses of the first 16 bytes of a thread in a tile's first 64 columns, [32, 32] words in a layout that gives a
    thread 8 neighbouring words of a token."""
    row = gl.arange(0, OWN, gl.SliceLayout(1, LAYOUT))[:, None]
    word = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))[None, :]
    return cluster.own + row * 128 + (((word >> 3) * 2) ^ (row & 7)) * 16


@gluon.jit
def store(pairs, addresses, TILE: gl.constexpr, COLUMNS: gl.constexpr):
    """Store pairs of bf16 [32, 32] as 64 columns of this CTA's tokens, with a tile's swizzle."""
    ptx.store_32_bytes(pairs, addresses, TILE * TILE_BYTES + COLUMNS * COLUMNS_BYTES)


@gluon.jit
def send(TILE: gl.constexpr, PIECES: gl.constexpr, FULL: gl.constexpr, cluster):
    """A warp sends what it has stored of a half, 64 columns a piece."""
    ptx.send_rows(
        cluster.own,
        cluster.peer,
        cluster.peer_barriers,
        TILE * TILE_BYTES,
        COLUMNS_BYTES,
        PIECES,
        WARP_ROWS,
        PEER_ROWS,
        _offset(FULL),
    )
