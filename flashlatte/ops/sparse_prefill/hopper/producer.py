"""The producer warpgroup: gathers the selected rows of kv into shared memory, and q by TMA.

It refills a half of a K block as soon as the consumer that multiplied it last lets go, in the order in which that
happens: block 0's left, block 0's right, block 1's left, block 1's right.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from flashlatte.gluon_compat import aggregate, cp_async, tma_load
from flashlatte.named_barriers import wait
from flashlatte.ops.sparse_prefill.hopper import barriers
from flashlatte.ops.sparse_prefill.hopper.state import pairs_of

# A thread copies 16 bytes at a time, eight neighbours the 128 bytes of a swizzled line.
_GATHER = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_ROWS = gl.constexpr(gl.SliceLayout(1, _GATHER))
_COLUMNS = gl.constexpr(gl.SliceLayout(0, _GATHER))


@aggregate
class Rows:
    """The rows of kv that a block gathers."""

    pointers: gl.tensor  # [64]
    valid: gl.tensor  # [64]

    @gluon.constexpr_function
    def __init__(self, pointers, valid):
        self.pointers = pointers
        self.valid = valid


@gluon.jit
def _load_indices(row, first, count):
    position = first + gl.arange(0, 64, _ROWS)
    return gl.load(row + position, mask=position < count, other=-1, eviction_policy="evict_first")


@gluon.jit
def _rows(indices, kv, stride, s_kv):
    valid = (indices >= 0) & (indices < s_kv)
    # The stride comes in units of 16 bytes, so that the compiler knows the alignment that 16-byte copies need.
    ELEMENTS: gl.constexpr = 128 // kv.dtype.element_ty.primitive_bitwidth
    offsets = gl.where(valid, indices, 0).to(gl.int64) * stride * ELEMENTS
    return Rows(kv + offsets, valid)


@gluon.jit
def _copy(rows, FIRST: gl.constexpr, tile):
    WIDTH: gl.constexpr = tile.shape[1]
    # Rows that select nothing are filled with zeros: their weight is 0, and 0 x NaN would still be NaN.
    pointers = rows.pointers[:, None] + (FIRST + gl.arange(0, WIDTH, _COLUMNS))[None, :]
    cp_async(tile, pointers, mask=rows.valid[:, None])


@gluon.jit
def _signal(barrier):
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def _copy_left(rows, k, ready):
    left = k.left.index(0)
    _copy(rows, 0, left.slice(0, 128, dim=1))
    _signal(ready.quarter0)
    _copy(rows, 128, left.slice(128, 128, dim=1))
    _signal(ready.quarter1)


@gluon.jit
def _copy_right(rows, k, ready, HEAD_DIM: gl.constexpr):
    right = k.right.index(0)
    if HEAD_DIM == 576:
        _copy(rows, 512, k.rope.index(0))
    _copy(rows, 256, right.slice(0, 128, dim=1))
    _signal(ready.quarter2)
    _copy(rows, 384, right.slice(128, 128, dim=1))
    _signal(ready.quarter3)


@gluon.jit
def _publish_mask(rows, mask, ready):
    mask.store(rows.valid.to(gl.int32))
    mbarrier.arrive(ready.mask, count=1)


@gluon.jit
def _load_q(q_desc, q_rope_desc, tile, head_blocks, shared, HEAD_DIM: gl.constexpr):
    token = tile // head_blocks
    head = (tile % head_blocks) * 64
    BYTES: gl.constexpr = 64 * HEAD_DIM * 2
    mbarrier.expect(shared.q_ready, BYTES)
    tma_load(q_desc, [token, head, 0], shared.q_ready, shared.q.left.index(0))
    tma_load(q_desc, [token, head, 256], shared.q_ready, shared.q.right.index(0))
    if HEAD_DIM == 576:
        tma_load(q_rope_desc, [token, head, 512], shared.q_ready, shared.q.rope.index(0))


@gluon.jit
def _announce_nothing(ready):
    _signal(ready.quarter0)
    _signal(ready.quarter1)
    _signal(ready.quarter2)
    _signal(ready.quarter3)
    mbarrier.arrive(ready.mask, count=1)


@gluon.jit
def produce(q_desc, q_rope_desc, kv, kv_stride, problem, shared, HEAD_DIM: gl.constexpr):
    k0 = shared.k0
    k1 = shared.k1
    ready0 = shared.ready0
    ready1 = shared.ready1

    first = gl.program_id(0)
    row = problem.row(first)
    count = problem.selected(first)
    indices0 = _load_indices(row, 0, count)
    indices1 = _load_indices(row, 64, count)
    for tile in range(first, problem.tiles, gl.num_programs(0)):
        next_tile = tile + gl.num_programs(0)
        next_row = problem.row(next_tile)
        next_count = problem.selected(next_tile)
        pairs = pairs_of(count)

        wait(barriers.Q_FREE, barriers.ALL)
        _load_q(q_desc, q_rope_desc, tile, problem.head_blocks, shared, HEAD_DIM)
        for pair in range(pairs):
            rows0 = _rows(indices0, kv, kv_stride, problem.s_kv)
            rows1 = _rows(indices1, kv, kv_stride, problem.s_kv)
            wait(barriers.LEFT0_FREE, barriers.PAIR)
            _copy_left(rows0, k0, ready0)
            _publish_mask(rows0, shared.mask0, ready0)
            wait(barriers.RIGHT0_FREE, barriers.PAIR)
            _copy_right(rows0, k0, ready0, HEAD_DIM)
            # Indices come from HBM: the next pair's, also across tiles, are asked for half a pair ahead.
            last = pair == pairs - 1
            ahead = gl.where(last, 0, (pair + 1) * 128)
            ahead_row = gl.where(last, next_row, row)
            ahead_count = gl.where(last, next_count, count)
            indices0 = _load_indices(ahead_row, ahead, ahead_count)
            indices1 = _load_indices(ahead_row, ahead + 64, ahead_count)
            wait(barriers.LEFT1_FREE, barriers.PAIR)
            _copy_left(rows1, k1, ready1)
            _publish_mask(rows1, shared.mask1, ready1)
            wait(barriers.RIGHT1_FREE, barriers.PAIR)
            _copy_right(rows1, k1, ready1, HEAD_DIM)
        row = next_row
        count = next_count

    # The left consumer runs one score ahead, also after the last tile: it gets a tile and a block of whatever is there.
    wait(barriers.Q_FREE, barriers.ALL)
    mbarrier.arrive(shared.q_ready, count=1)
    wait(barriers.LEFT0_FREE, barriers.PAIR)
    wait(barriers.RIGHT0_FREE, barriers.PAIR)
    _announce_nothing(ready0)
    wait(barriers.LEFT1_FREE, barriers.PAIR)
    wait(barriers.RIGHT1_FREE, barriers.PAIR)
