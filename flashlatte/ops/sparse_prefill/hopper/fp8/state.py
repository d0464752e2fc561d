"""Shared memory, and the arguments of the partitions."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.barriers import allocate_mbarrier
from flashlatte.kernels.hopper.e4m3 import tiles
from flashlatte.kernels.hopper.e4m3.tiles import SLOTS
from flashlatte.kernels.hopper.mla_tiles import KEYS, ROWS, allocate_vector
from flashlatte.runtime.kernel_records import ElementPointer, Int64, Pointer

# Arrivals at a barrier of copies: one from each thread of the loader when its copies complete, and one after the
# stores.
_ARRIVALS = gl.constexpr(129)
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Fp8Workspace(NamedTuple):
    """Quantized rows of kv as pairs of bytes, stride in units of 16 bytes; and their scale, float32 [1]."""

    pairs: Pointer
    stride: Int64
    scale: ElementPointer


class Fp8QueryBuffers(NamedTuple):
    """Quantized queries of a CTA's current and next tile, e4m3 [CTAs, 2, 64, 640]: a latent, and the rope as two terms.

    ``elements`` and ``pairs`` are the same memory, as bytes and as pairs of bytes.
    """

    elements: Pointer
    pairs: Pointer


class Fp8PrefillShared(NamedTuple):
    """Shared memory in addition to ``e4m3.tiles.Fp8Tiles``.

    Attributes:
        indices: [2, 128], the indices of even and of odd steps.
        selected: int32 [4, 64], 0 for the rows of a slot that have no valid index.
        min_indices: int32 [4, 4], for each slot and warp of the loader; below 0 if the warp copied a row without valid
            index.
        q_scales: float32 [2, 64], the scale of each query of even and of odd tiles.
        score_max0: float32 [64], the even consumer's maximum of unscaled scores.
        q_full, q_empty: mbarriers of the queries.
    """

    indices: Any
    selected: Any
    min_indices: Any
    q_scales: Any
    score_max0: Any
    q_full: Any
    q_empty: Any


class Fp8PrefillArgs(NamedTuple):
    """Arguments of the partitions.

    Attributes:
        scale: softmax_scale · log2(e) · k_scale.
        k_scale: scale of the workspace.
    """

    tiles: Any
    shared: Any
    queries: Any
    buffers: Any
    keys: Any
    work: Any
    output: Any
    scale: Any
    k_scale: Any


@gluon.jit
def allocate(INDEX: gl.constexpr):
    shared = Fp8PrefillShared(
        gl.allocate_shared_memory(INDEX, [2, 2 * KEYS], VECTOR),
        gl.allocate_shared_memory(gl.int32, [SLOTS, KEYS], VECTOR),
        gl.allocate_shared_memory(gl.int32, [SLOTS, 4], VECTOR),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], VECTOR),
        allocate_vector(gl.float32),
        allocate_mbarrier(_ARRIVALS),
        allocate_mbarrier(2),
    )
    return tiles.allocate(_ARRIVALS), shared
