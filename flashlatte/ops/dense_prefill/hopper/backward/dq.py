"""dQ, summed over the blocks of keys in float32: [heads, tokens, d_qk], with a row's columns in an order of its own.

A thread has columns 2t and 2t + 1 of each eight. Stored two eights at a time as 4t to 4t + 3, an addition takes 16
bytes of a thread. ``source_column`` undoes the order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.gluon_compat import aggregate
from flashlatte.ops.dense_prefill.hopper.backward.schedule import QUERIES


@aggregate
class QueryGradient:
    """The sums, and in deterministic mode whose turn it is to add, for each tile of queries."""

    sums: gl.tensor
    turns: gl.tensor | gl.constexpr
    turns_per_head: gl.tensor  # tiles of a head
    q_total: gl.tensor
    columns: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, sums, turns, turns_per_head, q_total, columns):
        self.sums = sums
        self.turns = gl.constexpr(None) if turns is None else turns
        self.turns_per_head = turns_per_head
        self.q_total = q_total
        self.columns = gl.constexpr(columns)


_ADD_16_BYTES = gl.constexpr("""
{
    .reg .pred inside;
    setp.ne.s32 inside, $6, 0;
    @inside red.relaxed.gpu.global.add.v4.f32 [$1], {$2, $3, $4, $5};
    mov.u32 $0, $6;
}
""")


@gluon.jit
def add_columns(dq, tile, row_start, rows, FIRST: gl.constexpr):
    """Add [64 queries, columns] to columns FIRST and on of ``rows`` rows from ``row_start`` on."""
    COLUMNS: gl.constexpr = tile.shape[1]
    # [64, sixteens, thread, half, neighbour]
    tile = tile.reshape([QUERIES, COLUMNS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    even, odd = gl.split(tile)
    even0, even1 = gl.split(even)
    odd0, odd1 = gl.split(odd)
    even0 = even0.reshape([QUERIES, COLUMNS // 4])
    LAYOUT: gl.constexpr = even0.type.layout
    even1 = gl.convert_layout(even1.reshape([QUERIES, COLUMNS // 4]), LAYOUT, assert_trivial=True)
    odd0 = gl.convert_layout(odd0.reshape([QUERIES, COLUMNS // 4]), LAYOUT, assert_trivial=True)
    odd1 = gl.convert_layout(odd1.reshape([QUERIES, COLUMNS // 4]), LAYOUT, assert_trivial=True)
    row = gl.arange(0, QUERIES, gl.SliceLayout(1, LAYOUT))
    column = FIRST + gl.arange(0, COLUMNS // 4, gl.SliceLayout(0, LAYOUT)) * 4
    # 64-bit sums, which the compiler can make one register pair and constant offsets of.
    address = (dq.sums + row_start.to(gl.int64) * dq.columns).to(gl.int64) + (row.to(gl.int64) * (dq.columns * 4))[
        :, None
    ]
    address += (column.to(gl.int64) * 4)[None, :]
    inside = (row < rows)[:, None].to(gl.int32)
    gl.inline_asm_elementwise(
        _ADD_16_BYTES,
        "=r,l,f,f,f,f,r",
        [address, even0, odd0, even1, odd1, inside],
        gl.int32,
        is_pure=False,
        pack=1,
    )


# A warp adds to the same rows and columns of a tile in every program, so turns are taken warp by warp.
WARPS = gl.constexpr(8)
_THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

# Labels in braces are local to them.
_WAIT_FOR_TURN = gl.constexpr("""
{
    .reg .pred early;
    .reg .b32 turn;
AGAIN:
    ld.acquire.gpu.global.b32 turn, [$1];
    setp.ne.s32 early, turn, $2;
    @early bra AGAIN;
    mov.u32 $0, turn;
}
""")
_PASS_TURN = gl.constexpr("""
{
    .reg .pred first;
    setp.eq.s32 first, $2, 0;
    fence.acq_rel.gpu;
    bar.warp.sync 0xffffffff;
    @first red.relaxed.gpu.global.add.u32 [$1], 1;
    mov.u32 $0, $2;
}
""")


@gluon.jit
def turn_address(dq, block, head, query, OWN: gl.constexpr):
    """Where each thread of a consumer finds whose turn it is at the tile of queries from ``query`` on."""
    thread = gl.arange(0, 128, _THREADS)
    tile = head * dq.turns_per_head + block.q_slot + query // QUERIES
    return (dq.turns + (tile * WARPS + OWN * 4)).to(gl.int64) + thread // 32 * 4


@gluon.jit
def take_turn(address, turn):
    """Wait until the later blocks have added to the tile."""
    turns = gl.full([128], 0, gl.int32, _THREADS) + turn
    gl.inline_asm_elementwise(_WAIT_FOR_TURN, "=r,l,r", [address, turns], gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(address, added):
    """Let the next block add to the tile, if this one has."""
    lane = gl.arange(0, 128, _THREADS) % 32
    lane = gl.where(added, lane, 32)
    gl.inline_asm_elementwise(_PASS_TURN, "=r,l,r", [address, lane], gl.int32, is_pure=False, pack=1)
