"""Register layouts, tiles in shared memory and barriers of the three warpgroups."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashlatte.kernels.hopper.barriers import FIRST_FREE
from flashlatte.kernels.hopper.output_tiles import accumulator
from flashlatte.ops.dense_prefill.hopper.backward.schedule import QUERIES

# Keys of a consumer: half of a program's.
OWN_KEYS = gl.constexpr(64)
STAGES = gl.constexpr(2)
V_DIM = gl.constexpr(128)
# d_qk = 192 is split into columns 0 to 127 (main) and 128 to 191 (rope).
MAIN = gl.constexpr(128)
ROPE = gl.constexpr(64)

TILE_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_DQ_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
_ROW_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

# [64 keys, 64 queries], and its rows and columns.
SCORE_LAYOUT = gl.constexpr(accumulator(64))
SCORE_ROW = gl.constexpr(gl.SliceLayout(1, SCORE_LAYOUT))
SCORE_COLUMN = gl.constexpr(gl.SliceLayout(0, SCORE_LAYOUT))
# Gradients [64 keys, columns], and dQ [64 queries, columns].
GRAD_128 = gl.constexpr(accumulator(128))
GRAD_64 = SCORE_LAYOUT
DQ_64 = SCORE_LAYOUT
DQ_32 = gl.constexpr(accumulator(32))

# Named barriers, by what the waiting partition does next.
STAGE_EMPTY = gl.constexpr(FIRST_FREE)  # load queries into a stage: consumers to producer
DOUT_EMPTY = gl.constexpr(FIRST_FREE + STAGES)  # load the next dO: consumers to producer
DS_FULL = gl.constexpr(FIRST_FREE + STAGES + 1)  # read dS: consumers to each other
DQ_FULL = gl.constexpr(FIRST_FREE + STAGES + 2)  # add dQ to the sums: consumers to producer
DQ_EMPTY = gl.constexpr(FIRST_FREE + STAGES + 3)  # stage the next dQ: producer to consumers


@gluon.constexpr_function
def operand(columns):
    """P or dS as the left operand of a product with ``columns`` columns."""
    return gl.DotOperandLayout(0, accumulator(columns), 2)


class ConsumerKeys(NamedTuple):
    """A consumer's 64 keys, which stay during the whole kernel, its dS, and its columns of dQ."""

    main: Any  # [1, 64, 128]
    rope: Any  # [1, 64, 64]; unused with d_qk 128
    v: Any  # [1, 64, 128]
    ds: Any  # [2, 64, 64], of even and odd steps
    dq_main: Any  # float32 [1, 64, 64]
    dq_rope: Any  # float32 [1, 64, 32]; unused with d_qk 128


class BackwardShared(NamedTuple):
    """Everything in shared memory. Axis 0 of the queries and of the row vectors is the stage."""

    keys0: Any
    keys1: Any
    q_main: Any  # [STAGES, 64, 128]
    q_rope: Any  # [STAGES, 64, 64]
    dout: Any  # [1, 64, 128]
    lse: Any  # float32 [STAGES, 64], in base 2
    delta: Any  # float32 [STAGES, 64]
    keys_full: Any
    stage_full: Any
    dout_full: Any


@gluon.jit
def _keys(DTYPE: gl.constexpr, HAS_ROPE: gl.constexpr):
    main = gl.allocate_shared_memory(DTYPE, [1, OWN_KEYS, MAIN], TILE_LAYOUT)
    rope = gl.allocate_shared_memory(DTYPE, [1, OWN_KEYS, ROPE], TILE_LAYOUT) if HAS_ROPE else main
    v = gl.allocate_shared_memory(DTYPE, [1, OWN_KEYS, V_DIM], TILE_LAYOUT)
    ds = gl.allocate_shared_memory(DTYPE, [2, OWN_KEYS, QUERIES], TILE_LAYOUT)
    dq_main = gl.allocate_shared_memory(gl.float32, [1, QUERIES, MAIN // 2], _DQ_LAYOUT)
    dq_rope = gl.allocate_shared_memory(gl.float32, [1, QUERIES, ROPE // 2], _DQ_LAYOUT) if HAS_ROPE else dq_main
    return ConsumerKeys(main, rope, v, ds, dq_main, dq_rope)


@gluon.jit
def allocate(DTYPE: gl.constexpr, HAS_ROPE: gl.constexpr):
    keys0 = _keys(DTYPE, HAS_ROPE)
    keys1 = _keys(DTYPE, HAS_ROPE)
    q_main = gl.allocate_shared_memory(DTYPE, [STAGES, QUERIES, MAIN], TILE_LAYOUT)
    q_rope = gl.allocate_shared_memory(DTYPE, [STAGES, QUERIES, ROPE], TILE_LAYOUT) if HAS_ROPE else q_main
    dout = gl.allocate_shared_memory(DTYPE, [1, QUERIES, V_DIM], TILE_LAYOUT)
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], _ROW_LAYOUT)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], _ROW_LAYOUT)
    keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_full, count=1)
    stage_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Arrivals: the TMA tiles, and the producer's row vectors.
        mbarrier.init(stage_full.index(stage), count=2)
    dout_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(dout_full, count=1)
    return BackwardShared(keys0, keys1, q_main, q_rope, dout, lse, delta, keys_full, stage_full, dout_full)
