"""The Gluon names that moved between Triton 3.6 and 3.9, under one name each.

Kernels import them from here, as plain names: Gluon resolves every attribute that a kernel mentions, also in a branch
that is not taken.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

# Copy of a tile from global to shared memory by the copy engine: (descriptor, coordinates, mbarrier, tile).
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@builtin
def _async_tma_add(descriptor, coordinates, tile, _semantic=None):
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, tile.handle)


# Addition of a tile in shared memory to global memory by the copy engine: (descriptor, coordinates, tile).
tma_add = getattr(tma, "async_atomic_add", None) or _async_tma_add

# Copy of 16-byte pieces from global to shared memory by the threads: (tile, pointers, mask).
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# The same shared memory as another tile: (tile, dtype, shape, layout).
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

# Barrier of the warps of a partition (of the program, outside warp specialization).
cta_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
