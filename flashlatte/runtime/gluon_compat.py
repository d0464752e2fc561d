"""Gluon functions whose names differ between Triton 3.6 and 3.9, under one name each.

Kernels import these names directly: Gluon resolves every attribute access in a kernel, even in a branch that is not
taken.
"""

from __future__ import annotations

import math

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

# Alignment, in bytes, of TMA's shared-memory addresses. Others fault ("misaligned address"), which can also make other
# processes on the GPU fail.
_TMA_ALIGNMENT = 128

_async_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


def check_tma_tile(tile) -> None:
    """Raise unless the tiles of a ring of such tiles are aligned for TMA."""
    tile_bytes = math.prod(tile.shape) * tile.dtype.primitive_bitwidth // 8
    if tile_bytes % _TMA_ALIGNMENT:
        raise ValueError(
            f"the size of a TMA tile must be a multiple of {_TMA_ALIGNMENT} bytes, got {tile_bytes}: {tile.shape}"
        )


@builtin
def tma_load(descriptor, coordinates, barrier, tile, _semantic=None):
    """Copy a tile from global to shared memory by TMA; it completes on ``barrier``."""
    check_tma_tile(tile)
    _async_tma_load(descriptor, coordinates, barrier, tile, _semantic=_semantic)


@builtin
def _async_tma_add(descriptor, coordinates, tile, _semantic=None):
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, tile.handle)


_tma_add = getattr(tma, "async_atomic_add", None) or _async_tma_add


@builtin
def tma_add(descriptor, coordinates, tile, _semantic=None):
    """Add a tile in shared memory to global memory by TMA."""
    check_tma_tile(tile)
    _tma_add(descriptor, coordinates, tile, _semantic=_semantic)


_tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def tma_store(descriptor, coordinates, tile, _semantic=None):
    """Copy a tile in shared memory to global memory by TMA; ``tma.store_wait`` waits until the tile is read."""
    check_tma_tile(tile)
    _tma_store(descriptor, coordinates, tile, _semantic=_semantic)


# cp.async: copies from global to shared memory by threads, (tile, pointers, mask).
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# A view of the same shared memory as another tile: (tile, dtype, shape, layout).
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

# Barrier for the warps of a partition (of the CTA, outside warp specialization).
cta_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
