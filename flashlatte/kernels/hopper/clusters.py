"""Two CTAs of a cluster that need the same keys: each dequantizes half of the tokens of every block for both CTAs.

The blocks of the two CTAs hold the same tokens in different rows: rows 0 to 31 of a tile are the CTA's own 32 tokens,
rows 32 to 63 the tokens that its peer dequantized. A warp of the producer stores its 8 tokens of a half, and then
copies them to the peer through DSMEM (cp.async.bulk), where an mbarrier counts the bytes. A half is empty when the
consumers of both CTAs have read it.

Mbarriers replace the named barriers of empty and full halves. They are in the tail of shared memory, after Triton's
allocations (``ptx.clusters``). The halves of both blocks are contiguous, in one allocation at the start of shared
memory.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.barriers import FIRST_FREE
from flashlatte.kernels.hopper.ptx import clusters as ptx
from flashlatte.kernels.hopper.ptx.threads import trap_unless
from flashlatte.kernels.hopper.shared_memory import find_tiles, offset_of

# Bytes of shared memory after Triton's allocations: eight mbarriers.
TAIL_BYTES = gl.constexpr(64)
# Tokens of a block that a CTA dequantizes.
OWN_TOKENS = gl.constexpr(32)
# Indices of the halves in their allocation.
K0_LEFT = gl.constexpr(0)
K0_RIGHT = gl.constexpr(1)
K1_LEFT = gl.constexpr(2)
K1_RIGHT = gl.constexpr(3)

TILE_BYTES = gl.constexpr(32768)
# Bytes: 64 columns of a tile (64 rows of 128 bytes); the offset of the peer's rows in them; 8 rows of a warp.
COLUMNS_BYTES = gl.constexpr(8192)
PEER_ROWS = gl.constexpr(4096)
WARP_ROWS = gl.constexpr(1024)
# Warps that read a half.
_READERS = 2 * 4
# Arrivals of the mbarriers. Empty: each warp of the consumer that reads the half, in both CTAs. Full: the thread that
# sets the expected number of bytes.
_COUNTS = gl.constexpr([_READERS] * 4 + [1] * 4)


class ClusterAddresses(NamedTuple):
    """Addresses of the shared memory and of the mbarriers, in this CTA and in its peer."""

    own: Any
    peer: Any
    barriers: Any
    peer_barriers: Any


@gluon.constexpr_function
def _offset(BARRIER):
    """Byte offset of the mbarrier that replaces a named barrier."""
    return 8 * (BARRIER - FIRST_FREE)


@gluon.jit
def find_peer(first_half):
    """Initialize this CTA's mbarriers and return the addresses. ``first_half``: the left half of block 0, at the start
    of the allocation of halves.

    Triton places the largest allocation, which this is, at the start of shared memory. The kernel traps if it is
    elsewhere: an address determined at run time would need registers that the producer does not have.
    """
    trap_unless(offset_of(0, find_tiles((first_half.index(0),))) == 0)
    cluster = ClusterAddresses(
        ptx.shared_address(0, False),
        ptx.shared_address(0, True),
        ptx.shared_address(TAIL_BYTES, False),
        ptx.shared_address(TAIL_BYTES, True),
    )
    ptx.init_mbarriers(cluster.barriers, _COUNTS)
    return cluster


@gluon.jit
def wait(BARRIER: gl.constexpr, cluster, phase):
    """Wait until both CTAs have read a half, or until the peer's tokens have arrived."""
    ptx.wait_mbarrier(cluster.barriers, _offset(BARRIER), phase)


@gluon.jit
def release(EMPTY: gl.constexpr, cluster):
    """Signal to both producers that a warp has read a half."""
    ptx.arrive_both(cluster.barriers, cluster.peer_barriers, _offset(EMPTY))


@gluon.jit
def expect(FULL: gl.constexpr, PIECES: gl.constexpr, cluster):
    """Set the bytes of a half that the mbarrier expects from the peer: PIECES pieces of 64 columns."""
    ptx.expect_bytes(cluster.barriers, _offset(FULL), PIECES * 4 * WARP_ROWS)


@gluon.jit
def addresses(cluster, LAYOUT: gl.constexpr):
    """Addresses of a thread's first 16 bytes in the first 64 columns of a tile: [32, 32] words, in a layout that gives
    each thread 8 adjacent words of a token."""
    row = gl.arange(0, OWN_TOKENS, gl.SliceLayout(1, LAYOUT))[:, None]
    word = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))[None, :]
    return cluster.own + row * 128 + (((word >> 3) * 2) ^ (row & 7)) * 16


@gluon.jit
def store(pairs, addresses, TILE: gl.constexpr, COLUMNS: gl.constexpr):
    """Store pairs of bf16 [32, 32] as 64 columns of this CTA's tokens, swizzled as the tile is."""
    ptx.store_32_bytes(pairs, addresses, TILE * TILE_BYTES + COLUMNS * COLUMNS_BYTES)


@gluon.jit
def send(TILE: gl.constexpr, PIECES: gl.constexpr, FULL: gl.constexpr, cluster):
    """Send what a warp has stored of a half to the peer, in pieces of 64 columns."""
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
