"""Shared memory and barriers of the queries kernel.

The *scores* consumer computes S and P, the *values* consumer dP and dS; each also holds half of the columns of dQ. The
consumer of a quarter's columns of dQ releases that quarter of K: by then both consumers have finished S and dP.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.barriers import FIRST_FREE, allocate_mbarrier
from flashlatte.kernels.hopper.mla_tiles import (
    LatentTile,
    QuarterFullBarriers,
    allocate_quarter_barriers,
    allocate_rows,
    allocate_square,
    allocate_vector,
)

# Named barriers: a quarter of K is empty (a consumer to the producer).
K_QUARTER0_EMPTY = gl.constexpr(FIRST_FREE)
K_QUARTER1_EMPTY = gl.constexpr(FIRST_FREE + 1)
K_QUARTER2_EMPTY = gl.constexpr(FIRST_FREE + 2)
K_QUARTER3_EMPTY = gl.constexpr(FIRST_FREE + 3)
# Named barriers: P (scores to values consumer) or dS (values to scores consumer) is in shared memory.
P_FULL = gl.constexpr(FIRST_FREE + 4)
DS_FULL = gl.constexpr(FIRST_FREE + 5)

# A product [64, 128] for dQ.
QUARTER = gl.constexpr(128)
GRADIENT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


class SparseBackwardTiles(NamedTuple):
    q: LatentTile
    dout: LatentTile  # no RoPE
    k: LatentTile
    p: Any  # [1, 64, 64]
    ds: Any  # [1, 64, 64]
    mask: Any  # int32 [64], 0 for invalid keys
    weight: Any  # float32 [64], of the sink
    q_full: Any
    dout_full: Any
    k_full: QuarterFullBarriers


@gluon.jit
def allocate(DTYPE: gl.constexpr, HAS_ROPE: gl.constexpr):
    return SparseBackwardTiles(
        allocate_rows(DTYPE, HAS_ROPE),
        allocate_rows(DTYPE, False),
        allocate_rows(DTYPE, HAS_ROPE),
        allocate_square(DTYPE),
        allocate_square(DTYPE),
        allocate_vector(gl.int32),
        allocate_vector(gl.float32),
        allocate_mbarrier(),
        allocate_mbarrier(),
        allocate_quarter_barriers(),
    )
