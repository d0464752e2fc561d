"""dQ, summed over the blocks of keys in float32, [heads, tokens, d_qk].

The consumers put a step's dQ in shared memory, and the producer has the copy engine add it to the sums. Columns are in
an order of their own: a thread has columns 2t and 2t + 1 of each eight, and puts the eight numbers that it has of
thirty-two columns side by side, so that it stores 16 bytes at a time, eight threads without a bank conflict.
``finish_kernel`` undoes the order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper.tma import tensor_descriptor

from flashlatte.ops.dense_prefill.hopper.backward.schedule import QUERIES
from flashlatte.ops.dense_prefill.hopper.backward.state import MAIN
from flashlatte.runtime.gluon_compat import aggregate, tma_add

# Columns that are in an order of their own, and that the copy engine adds at a time: 128 bytes.
SUM_COLUMNS = gl.constexpr(32)


@aggregate
class QueryGradient:
    """The sums, and in deterministic mode whose turn it is to add, for each tile of queries."""

    sums: tensor_descriptor  # of tiles [1, 64, SUM_COLUMNS]
    turns: gl.tensor | gl.constexpr
    turns_per_head: gl.tensor  # tiles of a head

    @gluon.constexpr_function
    def __init__(self, sums, turns, turns_per_head):
        self.sums = sums
        self.turns = gl.constexpr(None) if turns is None else turns
        self.turns_per_head = turns_per_head


@gluon.jit
def stage_columns(staging, tile, rows):
    """Put [64 queries, columns] in shared memory, with zeros for rows from ``rows`` on: they are not the request's."""
    COLUMNS: gl.constexpr = tile.shape[1]
    if rows < QUERIES:
        row = gl.arange(0, QUERIES, gl.SliceLayout(1, tile.type.layout))
        tile = gl.where((row < rows)[:, None], tile, 0.0)
    # [64, thirty-twos, sixteen, eight, thread, neighbour]
    tile = tile.reshape([QUERIES, COLUMNS // SUM_COLUMNS, 2, 2, 4, 2]).permute((0, 1, 4, 2, 3, 5))
    staging.store(tile.reshape([QUERIES, COLUMNS]))


@gluon.jit
def add_staged(dq, shared, head, token, HAS_ROPE: gl.constexpr):
    """Add what the consumers have staged to the rows from ``token`` on, and wait until the copy engine has read it."""
    _add_own(dq, shared.keys0, head, token, 0, HAS_ROPE)
    _add_own(dq, shared.keys1, head, token, 1, HAS_ROPE)
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group.read 0; mov.u32 $0, $1;",
        "=r,r",
        [gl.arange(0, 128, _THREADS)],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _add_own(dq, own, head, token, OWN: gl.constexpr, HAS_ROPE: gl.constexpr):
    for column in gl.static_range(0, 64, SUM_COLUMNS):
        tma_add(dq.sums, [head, token, OWN * 64 + column], own.dq_main.index(0).slice(column, SUM_COLUMNS, dim=1))
    if HAS_ROPE:
        tma_add(dq.sums, [head, token, MAIN + OWN * SUM_COLUMNS], own.dq_rope.index(0))


_THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

# Labels in braces are local to them. The copy engine's additions are ordered with other accesses by proxy fences.
_WAIT_FOR_TURN = gl.constexpr("""
{
    .reg .pred early;
    .reg .b32 turn;
AGAIN:
    ld.acquire.gpu.global.b32 turn, [$1];
    setp.ne.s32 early, turn, $2;
    @early bra AGAIN;
    fence.proxy.async.global;
    mov.u32 $0, turn;
}
""")
_PASS_TURN = gl.constexpr("""
{
    .reg .pred first;
    setp.eq.s32 first, $2, 0;
    cp.async.bulk.wait_group 0;
    fence.proxy.async.global;
    bar.warp.sync 0xffffffff;
    @first red.release.gpu.global.add.u32 [$1], 1;
    mov.u32 $0, $2;
}
""")


@gluon.jit
def _turn_address(dq, block, head, query):
    """Where each thread of the producer finds whose turn it is at the tile of queries from ``query`` on."""
    tile = head * dq.turns_per_head + block.q_slot + query // QUERIES
    return gl.full([128], 0, gl.int64, _THREADS) + (dq.turns + tile).to(gl.int64)


@gluon.jit
def take_turn(dq, block, head, query):
    """Wait until the later blocks have added to the tile."""
    turn = gl.full([128], 0, gl.int32, _THREADS) + block.turn(query)
    address = _turn_address(dq, block, head, query)
    gl.inline_asm_elementwise(_WAIT_FOR_TURN, "=r,l,r", [address, turn], gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(dq, block, head, query):
    """Let the next block add to the tile, once the sums have what this one added."""
    thread = gl.arange(0, 128, _THREADS)
    address = _turn_address(dq, block, head, query)
    gl.inline_asm_elementwise(_PASS_TURN, "=r,l,r", [address, thread], gl.int32, is_pure=False, pack=1)
