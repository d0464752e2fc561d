"""What the three warpgroups share: tiles in shared memory, their barriers, and the problem."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.barriers import allocate_mbarrier
from flashlatte.kernels.hopper.mla_tiles import OWN_BARRIERS, allocate_half, allocate_square, allocate_vector
from flashlatte.kernels.hopper.shared_memory import find_tiles, offset_of
from flashlatte.runtime.gluon_compat import aggregate

# The named barrier of the queries, which may be replaced: both consumers to the producer.
Q_EMPTY = gl.constexpr(OWN_BARRIERS)


@aggregate
class LatentTile:
    """64 rows of q or kv, cut where the work is cut: a consumer's half of the output is a half of these columns.

    The leading axis of 1 is indexed by ``opaque_zero`` values: what the compiler knows to be constant it hoists out
    of the loop as wgmma descriptors, more than there are registers.
    """

    left: gl.shared_memory_descriptor  # [1, 64, 256], columns 0 to 255
    right: gl.shared_memory_descriptor  # [1, 64, 256], columns 256 to 511
    rope: gl.shared_memory_descriptor  # [1, 64, 64], columns 512 to 575; with head_dim 512 nothing reads it

    @gluon.constexpr_function
    def __init__(self, left, right, rope):
        self.left = left
        self.right = right
        self.rope = rope


@aggregate
class TileOffsets:
    """Where the parts of a LatentTile lie, in bytes from the start of shared memory."""

    left: gl.tensor
    right: gl.tensor
    rope: gl.tensor

    @gluon.constexpr_function
    def __init__(self, left, right, rope):
        self.left = left
        self.right = right
        self.rope = rope


@aggregate
class BlockFull:
    """The barriers that tell a consumer how much of a K block has arrived, a quarter of the latent at a time.

    RoPE columns are copied before the third quarter and arrive with it.
    """

    quarter0: gl.shared_memory_descriptor
    quarter1: gl.shared_memory_descriptor
    quarter2: gl.shared_memory_descriptor
    quarter3: gl.shared_memory_descriptor
    mask: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, quarter0, quarter1, quarter2, quarter3, mask):
        self.quarter0 = quarter0
        self.quarter1 = quarter1
        self.quarter2 = quarter2
        self.quarter3 = quarter3
        self.mask = mask


@aggregate
class Shared:
    """Everything in shared memory. Blocks 0 and 1 are the two halves of a pair of 64 selected tokens each."""

    q: LatentTile
    q_offsets: TileOffsets
    q_full: gl.shared_memory_descriptor
    k0: LatentTile
    k1: LatentTile
    k1_offsets: TileOffsets
    full0: BlockFull
    full1: BlockFull
    mask0: gl.shared_memory_descriptor  # int32 [64], 0 where an index selects nothing
    mask1: gl.shared_memory_descriptor
    p0: gl.shared_memory_descriptor  # [1, 64, 64]
    p1: gl.shared_memory_descriptor  # [1, 64, 64]
    row_max0: gl.shared_memory_descriptor  # float32 [64], as those that follow
    row_max1: gl.shared_memory_descriptor
    row_sum0: gl.shared_memory_descriptor
    row_sum1: gl.shared_memory_descriptor
    score_max0: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self,
        q,
        q_offsets,
        q_full,
        k0,
        k1,
        k1_offsets,
        full0,
        full1,
        mask0,
        mask1,
        p0,
        p1,
        row_max0,
        row_max1,
        row_sum0,
        row_sum1,
        score_max0,
    ):
        self.q = q
        self.q_offsets = q_offsets
        self.q_full = q_full
        self.k0 = k0
        self.k1 = k1
        self.k1_offsets = k1_offsets
        self.full0 = full0
        self.full1 = full1
        self.mask0 = mask0
        self.mask1 = mask1
        self.p0 = p0
        self.p1 = p1
        self.row_max0 = row_max0
        self.row_max1 = row_max1
        self.row_sum0 = row_sum0
        self.row_sum1 = row_sum1
        self.score_max0 = score_max0


@aggregate
class Problem:
    """The selection and its extents. A tile is 64 heads of one query token."""

    indices: gl.tensor
    index_stride: gl.tensor
    lengths: gl.tensor | gl.constexpr
    length_stride: gl.tensor
    s_kv: gl.tensor
    topk: gl.tensor
    head_blocks: gl.tensor
    tiles: gl.tensor

    @gluon.constexpr_function
    def __init__(self, indices, index_stride, lengths, length_stride, s_kv, topk, head_blocks, tiles):
        self.indices = indices
        self.index_stride = index_stride
        self.lengths = gl.constexpr(None) if lengths is None else lengths
        self.length_stride = length_stride
        self.s_kv = s_kv
        self.topk = topk
        self.head_blocks = head_blocks
        self.tiles = tiles

    @gluon.jit
    def token(self, tile):
        """The query token of a tile; for tiles beyond the last, the last."""
        return gl.minimum(tile, self.tiles - 1) // self.head_blocks

    @gluon.jit
    def selected(self, tile):
        """How many of the token's indices count."""
        count = self.topk
        if self.lengths is not None:
            length = gl.load(self.lengths + self.token(tile).to(gl.int64) * self.length_stride)
            count = gl.minimum(gl.maximum(length, 0), count).to(gl.int32)
        return count

    @gluon.jit
    def row(self, tile):
        """Pointer to the token's first index."""
        return self.indices + self.token(tile).to(gl.int64) * self.index_stride


@gluon.jit
def pairs_of(count):
    """Pairs of blocks that cover so many indices; a token that selects nothing still runs one, all masked."""
    return gl.maximum((count + 127) // 128, 1)


@gluon.jit
def _block_full():
    return BlockFull(
        allocate_mbarrier(128),
        allocate_mbarrier(128),
        allocate_mbarrier(128),
        allocate_mbarrier(128),
        allocate_mbarrier(1),
    )


@gluon.jit
def _tile(DTYPE: gl.constexpr, HEAD_DIM: gl.constexpr):
    left = allocate_half(DTYPE)
    right = allocate_half(DTYPE)
    rope = allocate_square(DTYPE) if HEAD_DIM == 576 else left
    return LatentTile(left, right, rope)


@gluon.jit
def _offsets(q, k1, HEAD_DIM: gl.constexpr):
    # Inline PTX fills q's tile, and stores a finished tile of out from block 1's.
    if HEAD_DIM == 576:
        found = find_tiles(
            (q.left.index(0), q.right.index(0), k1.left.index(0), k1.right.index(0), q.rope.index(0), k1.rope.index(0))
        )
    else:
        found = find_tiles((q.left.index(0), q.right.index(0), k1.left.index(0), k1.right.index(0)))
    q_offsets = TileOffsets(offset_of(0, found), offset_of(1, found), offset_of(4, found))
    return q_offsets, TileOffsets(offset_of(2, found), offset_of(3, found), offset_of(5, found))


@gluon.jit
def allocate(DTYPE: gl.constexpr, HEAD_DIM: gl.constexpr):
    q = _tile(DTYPE, HEAD_DIM)
    k0 = _tile(DTYPE, HEAD_DIM)
    k1 = _tile(DTYPE, HEAD_DIM)
    # P of block 0 exists only between the last read of its RoPE columns and their refill.
    p0 = k0.rope if HEAD_DIM == 576 else allocate_square(DTYPE)
    p1 = allocate_square(DTYPE)
    mask0 = allocate_vector(gl.int32)
    mask1 = allocate_vector(gl.int32)
    q_offsets, k1_offsets = _offsets(q, k1, HEAD_DIM)
    return Shared(
        q,
        q_offsets,
        allocate_mbarrier(128),
        k0,
        k1,
        k1_offsets,
        _block_full(),
        _block_full(),
        mask0,
        mask1,
        p0,
        p1,
        allocate_vector(gl.float32),
        allocate_vector(gl.float32),
        allocate_vector(gl.float32),
        allocate_vector(gl.float32),
        allocate_vector(gl.float32),
    )
