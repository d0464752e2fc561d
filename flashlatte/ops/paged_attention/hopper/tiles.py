"""Tiles in shared memory, and the barriers that synchronize producer and consumers."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.barriers import allocate_mbarriers
from flashlatte.kernels.hopper.two_consumers import CHUNK, ROWS, SCALAR_LAYOUT, STAGES, PrefillConsumer, read_scalars

# Keys of a block.
KEYS = gl.constexpr(128)
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


class PagedPrefillConfig(NamedTuple):
    """Compile-time configuration of the kernel.

    Attributes:
        pack: query heads of a tile, a power of two: row r is head r % pack of token r // pack.
        chunks, v_chunks: chunks of 64 columns of a key and of a value.
        head_dim_v: columns of out.
        page_size: tokens of a page.
        box: tokens of a TMA box.
        align: unit of the strides of out, in elements.
        keys: keys of a block.
        has_pages: as in ``prefill_consumers.consume``.
    """

    pack: Any
    chunks: Any
    v_chunks: Any
    head_dim_v: Any
    page_size: Any
    box: Any
    align: Any
    keys: Any
    has_pages: Any = True


class PagedPrefillTile(NamedTuple):
    """A work tile: rows of one pack of heads, and the range of visible blocks of keys.

    Attributes:
        blocks: blocks of keys, at least 1; 0 ends the loop.
        last: index of the last block; blocks are processed in descending order.
        pack: index of the pack of heads.
        token: index of the first query token.
        tokens: query tokens of the tile.
        position: position of the first query among its request's keys (may be negative).
        first_key: first key that is visible to any of the queries.
        keys: keys of the request.
    """

    blocks: Any
    last: Any
    pack: Any
    token: Any
    tokens: Any
    position: Any
    first_key: Any
    keys: Any


class PagedPrefillShared(NamedTuple):
    """The consumers, with q ([chunks, 64, 64],), and the rings of blocks, with 2 stages each.

    The chunks of columns of a stage are contiguous.

    ``absent``: one bit per 8 keys of a block of K, set if their page is not in the cache.
    """

    first: PrefillConsumer
    second: PrefillConsumer
    k: Any  # ([2 * chunks, 128, 64],)
    v: Any  # ([2, v_chunks * 128, 64],)
    absent: Any  # int32 [2, 1]
    k_full: Any  # [2, 1]
    v_full: Any


@gluon.jit
def _consumer(DTYPE: gl.constexpr, CHUNKS: gl.constexpr):
    return PrefillConsumer(
        (gl.allocate_shared_memory(DTYPE, [CHUNKS, ROWS, CHUNK], SWIZZLED),),
        gl.allocate_shared_memory(gl.int32, [8, 1], SCALAR_LAYOUT),
        allocate_mbarriers(1),
    )


@gluon.jit
def allocate(DTYPE: gl.constexpr, CONFIG: gl.constexpr):
    return PagedPrefillShared(
        _consumer(DTYPE, CONFIG.chunks),
        _consumer(DTYPE, CONFIG.chunks),
        (gl.allocate_shared_memory(DTYPE, [STAGES * CONFIG.chunks, KEYS, CHUNK], SWIZZLED),),
        (gl.allocate_shared_memory(DTYPE, [STAGES, CONFIG.v_chunks * KEYS, CHUNK], SWIZZLED),),
        gl.allocate_shared_memory(gl.int32, [STAGES, 1], SCALAR_LAYOUT),
        allocate_mbarriers(STAGES),
        allocate_mbarriers(STAGES),
    )


@gluon.jit
def read_work_tile(smem):
    return PagedPrefillTile(*read_scalars(smem))
