"""What the warps of a program share: tiles in shared memory, and the barriers that pass them on."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.two_consumers import CHUNK, NUMBER, ROWS, STAGES, mbarriers, read_number, stage_of
from flashlatte.runtime.gluon_compat import reinterpret

# Keys of a block.
KEYS = gl.constexpr(128)
# Layout of scores [64, 128], and of its rows.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


class Plan(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
        pack: query heads that are rows of one tile, row r being head r % pack of token r // pack; a power of two.
        chunks, v_chunks: of 64 columns of a key and of a value.
        head_dim_v: columns of out.
        page_size, box: tokens of a page, and of the copies that it is read by.
        align: unit of the strides of out, in numbers.
    """

    pack: Any
    chunks: Any
    v_chunks: Any
    head_dim_v: Any
    page_size: Any
    box: Any
    align: Any


class Ticket(NamedTuple):
    """A tile of the work: rows of one pack of heads, and the blocks of keys that they see.

    Attributes:
        blocks: of keys, at least 1; 0 means that there is no more work.
        last: number of the last block; they are taken from the last to the first.
        pack: which heads.
        token: first query token, of all.
        tokens: query tokens of the tile.
        position: of the first query among its request's keys (may be negative).
        first_key, keys: the first key that any of the queries sees, and how many the request has.
    """

    blocks: Any
    last: Any
    pack: Any
    token: Any
    tokens: Any
    position: Any
    first_key: Any
    keys: Any


class Consumer(NamedTuple):
    """What belongs to one of the two consumers: its queries, the ticket, and the barrier on which both have come.

    The leading axis of ``q`` is the chunk of columns.
    """

    q: Any  # [chunks, 64, 64]
    ticket: Any  # int32 [8, 1]
    full: Any


class Shared(NamedTuple):
    """The rings of blocks, of 2 stages each, in which a stage's chunks of columns come one after the other.

    ``absent`` has a bit for each 8 keys of a block of K: whether their page is not in the cache.
    """

    first: Consumer
    second: Consumer
    k: Any  # [2 * chunks, 128, 64]
    v: Any  # [2, v_chunks * 128, 64]
    absent: Any  # int32 [2, 1]
    k_full: Any  # [2, 1]
    v_full: Any


@gluon.constexpr_function
def output_layout(V_CHUNKS):
    """Of a consumer's output [64, 64 * V_CHUNKS]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64 * V_CHUNKS, 16])


@gluon.jit
def values_of(shared, step):
    """The values [128, 64 * v_chunks] of a step."""
    stage = shared.v.index(stage_of(step))
    COLUMNS: gl.constexpr = stage.shape[0] // KEYS * CHUNK
    return reinterpret(stage, stage.dtype, [KEYS, COLUMNS], SWIZZLED)


@gluon.jit
def _consumer(DTYPE: gl.constexpr, CHUNKS: gl.constexpr):
    return Consumer(
        gl.allocate_shared_memory(DTYPE, [CHUNKS, ROWS, CHUNK], SWIZZLED),
        gl.allocate_shared_memory(gl.int32, [8, 1], NUMBER),
        mbarriers(1),
    )


@gluon.jit
def allocate(DTYPE: gl.constexpr, PLAN: gl.constexpr):
    return Shared(
        _consumer(DTYPE, PLAN.chunks),
        _consumer(DTYPE, PLAN.chunks),
        gl.allocate_shared_memory(DTYPE, [STAGES * PLAN.chunks, KEYS, CHUNK], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [STAGES, PLAN.v_chunks * KEYS, CHUNK], SWIZZLED),
        gl.allocate_shared_memory(gl.int32, [STAGES, 1], NUMBER),
        mbarriers(STAGES),
        mbarriers(STAGES),
    )


@gluon.jit
def read_ticket(box):
    return Ticket(
        read_number(box, 0),
        read_number(box, 1),
        read_number(box, 2),
        read_number(box, 3),
        read_number(box, 4),
        read_number(box, 5),
        read_number(box, 6),
        read_number(box, 7),
    )
