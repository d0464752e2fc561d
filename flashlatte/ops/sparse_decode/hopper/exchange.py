"""Two programs of one query token, in a cluster: each widens half of every block's tokens, for both.

Their blocks have the same tokens in different places: a program's own 32 are rows 0 to 31 of its tiles, those that its
peer has widened rows 32 to 63. When a warp of the producer has stored its 8 tokens of a half, it has the copy engine
send them to the peer, whose mbarrier counts the bytes. A half is free when the consumers of both programs have read it.

Triton knows of neither the cluster nor these mbarriers, which stand in the last bytes of the shared memory, behind its
own (``triton_clusters``). Tiles are found by their order in ``tiles.allocate``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.ops.sparse_decode.hopper import layouts, tiles
from flashlatte.runtime.gluon_compat import cta_barrier

# Shared memory behind Triton's: eight mbarriers.
TAIL_BYTES = 64
# Tokens of a block that a program widens.
OWN = gl.constexpr(32)
# Places of the tiles.
K0_LEFT = gl.constexpr(0)
K0_RIGHT = gl.constexpr(1)
K1_LEFT = gl.constexpr(2)
K1_RIGHT = gl.constexpr(3)

_TILE_BYTES = 32768
# Of 64 columns, which are 128 bytes of each of 64 rows; where the peer's rows begin there; and a warp's 8 rows.
_COLUMNS_BYTES = 8192
_PEER_ROWS = 4096
_WARP_ROWS = 1024
# Warps that read a half.
_READERS = 2 * 4


class Link(NamedTuple):
    """Addresses of the shared memory and of the mbarriers, of this program and of its peer."""

    own: Any
    peer: Any
    barriers: Any
    peer_barriers: Any


@gluon.constexpr_function
def _offset(BARRIER):
    """Of the mbarrier that stands for a named barrier: FREE ones, then READY ones."""
    return 8 * (BARRIER - tiles.K0_LEFT_FREE.value)


@gluon.constexpr_function
def _address_asm(IS_TAIL, OF_PEER):
    code = "{ .reg .b32 rank, size; mov.u32 $0, global_smem;"
    if IS_TAIL:
        code += f" mov.u32 size, %dynamic_smem_size; add.u32 $0, $0, size; sub.u32 $0, $0, {TAIL_BYTES};"
    if OF_PEER:
        code += " mov.u32 rank, %cluster_ctarank; xor.b32 rank, rank, 1; mapa.shared::cluster.u32 $0, $0, rank;"
    return code + " }"


@gluon.jit
def _address(IS_TAIL: gl.constexpr, OF_PEER: gl.constexpr):
    asm: gl.constexpr = _address_asm(IS_TAIL, OF_PEER)
    return gl.inline_asm_elementwise(asm, "=r,r", [gl.to_tensor(0)], gl.int32, is_pure=True, pack=1)


@gluon.jit
def link():
    return Link(_address(False, False), _address(False, True), _address(True, False), _address(True, True))


@gluon.constexpr_function
def _check_asm():
    # 1, 2, 3 and 4 as bf16.
    begin = "{ .reg .pred p; .reg .b32 base; .reg .b16 corner; mov.u32 base, global_smem; "
    checks = [
        f"ld.shared.b16 corner, [base+{tile * _TILE_BYTES}]; setp.ne.b16 p, corner, {bits}; @p trap;"
        for tile, bits in enumerate((0x3F80, 0x4000, 0x4040, 0x4080))
    ]
    return begin + " ".join(checks) + " mov.u32 $0, $1; }"


@gluon.jit
def _mark(tile, number):
    corner = tile.index(0).slice(0, 8, dim=0).slice(0, 64, dim=1)
    corner.store(gl.full([8, 64], number, tile.dtype, layouts.CORNER))


@gluon.jit
def check_tiles(shared):
    """Stop the program unless tiles lie where they are supposed to: Gluon keeps their addresses to itself."""
    _mark(shared.k0_left, 1.0)
    _mark(shared.k0_right, 2.0)
    _mark(shared.k1_left, 3.0)
    _mark(shared.k1_right, 4.0)
    cta_barrier()
    _by_each_thread(_check_asm(), (_each(0),))


@gluon.jit
def _each(x):
    """The same number for each thread of four warps."""
    return gl.full([128], x, gl.int32, layouts.threads_layout(128))


@gluon.constexpr_function
def _constraints(operands):
    return ",".join(["=r"] + ["r"] * operands)


@gluon.jit
def _by_each_thread(ASM: gl.constexpr, operands):
    CONSTRAINTS: gl.constexpr = _constraints(len(operands))
    gl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _init_asm():
    # FREE: a warp of each consumer that reads the half, of both programs. READY: whoever says how many bytes will come.
    counts = [_READERS] * 4 + [1] * 4
    inits = [f"@p mbarrier.init.shared::cta.b64 [$1+{8 * n}], {count};" for n, count in enumerate(counts)]
    begin = "{ .reg .pred p; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 p, thread, 0; "
    return begin + " ".join(inits) + " fence.mbarrier_init.release.cluster; mov.u32 $0, $1; }"


@gluon.jit
def init(link):
    _by_each_thread(_init_asm(), (_each(link.barriers),))


_ARRIVE = gl.constexpr("barrier.cluster.arrive.relaxed; mov.u32 $0, $1;")
_MEET = gl.constexpr("barrier.cluster.wait; mov.u32 $0, $1;")


@gluon.jit
def arrive():
    """Every warp of both programs arrives once, and then meets the others before it touches the peer's memory."""
    _by_each_thread(_ARRIVE, (_each(0),))


@gluon.jit
def meet():
    _by_each_thread(_MEET, (_each(0),))


@gluon.constexpr_function
def _wait_asm(BARRIER):
    attempt = f"mbarrier.try_wait.parity.shared::cta.b64 p, [$1+{_offset(BARRIER)}], $2;"
    return "{ .reg .pred p; WAITING: " + attempt + " @!p bra.uni WAITING; mov.u32 $0, $1; }"


@gluon.jit
def wait(BARRIER: gl.constexpr, link, phase):
    _by_each_thread(_wait_asm(BARRIER), (_each(link.barriers), _each(phase)))


@gluon.constexpr_function
def _expect_asm(READY, PIECES):
    expected = PIECES * 4 * _WARP_ROWS
    expect = f"@p mbarrier.arrive.expect_tx.shared::cta.b64 state, [$1+{_offset(READY)}], {expected};"
    begin = "{ .reg .pred p; .reg .b64 state; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 p, thread, 0; "
    return begin + expect + " mov.u32 $0, $1; }"


@gluon.jit
def expect(READY: gl.constexpr, PIECES: gl.constexpr, link):
    """Say how much of a half will come from the peer."""
    _by_each_thread(_expect_asm(READY, PIECES), (_each(link.barriers),))


@gluon.constexpr_function
def _release_asm(FREE):
    # Without a scope of the cluster, which would have this wait for all that the thread has stored: it has only read.
    return (
        "{ .reg .pred p; .reg .b64 state; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; "
        f"@p mbarrier.arrive.shared::cta.b64 state, [$1+{_offset(FREE)}]; "
        f"@p mbarrier.arrive.shared::cluster.b64 _, [$2+{_offset(FREE)}]; mov.u32 $0, $1; }}"
    )


@gluon.jit
def release(FREE: gl.constexpr, link):
    """A warp has read a half: both producers may fill it."""
    _by_each_thread(_release_asm(FREE), (_each(link.barriers), _each(link.peer_barriers)))


@gluon.jit
def places(link):
    """Where the first 16 bytes of a thread lie in a tile's first 64 columns, [32, 32] for WIDE_PIECE."""
    row = gl.arange(0, OWN, gl.SliceLayout(1, layouts.WIDE_PIECE))[:, None]
    word = gl.arange(0, 32, gl.SliceLayout(0, layouts.WIDE_PIECE))[None, :]
    return link.own + row * 128 + (((word >> 3) * 2) ^ (row & 7)) * 16


@gluon.constexpr_function
def _store_asm(TILE, COLUMNS):
    # Operands: 0 to 7 the words, also 8 to 15, then eight times the same place.
    offset = TILE * _TILE_BYTES + COLUMNS * _COLUMNS_BYTES
    return (
        f"{{ .reg .b32 second; st.shared.v4.b32 [$16+{offset}], {{$0, $1, $2, $3}}; "
        f"xor.b32 second, $16, 16; st.shared.v4.b32 [second+{offset}], {{$4, $5, $6, $7}}; }}"
    )


@gluon.constexpr_function
def _store_constraints():
    return ",".join(["=r"] * 8 + [str(i) for i in range(8)] + ["r"] * 8)


@gluon.jit
def store(pairs, places, TILE: gl.constexpr, COLUMNS: gl.constexpr):
    """Store pairs of bf16 [32, 32] as 64 columns of this program's tokens, with a tile's swizzle.

    By hand, for addresses that are the same in all tiles but for a constant: the compiler would keep many.
    """
    ASM: gl.constexpr = _store_asm(TILE, COLUMNS)
    gl.inline_asm_elementwise(ASM, _store_constraints(), [pairs, places], gl.int32, is_pure=False, pack=8)


@gluon.constexpr_function
def _send_asm(TILE, PIECES, READY):
    copy = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    copies = [
        f"add.u32 source, from, {piece * _COLUMNS_BYTES}; add.u32 target, to, {piece * _COLUMNS_BYTES}; "
        f"@p {copy} [target], [source], {_WARP_ROWS}, [barrier];"
        for piece in range(PIECES)
    ]
    return (
        "{ .reg .pred p; .reg .b32 thread, lane, from, to, barrier, source, target; "
        "fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff; "
        "mov.u32 thread, %tid.x; and.b32 lane, thread, 31; setp.eq.u32 p, lane, 0; shr.u32 thread, thread, 5; "
        f"mad.lo.u32 from, thread, {_WARP_ROWS}, {TILE * _TILE_BYTES}; "
        f"add.u32 to, from, $2; add.u32 to, to, {_PEER_ROWS}; add.u32 from, from, $1; "
        f"add.u32 barrier, $3, {_offset(READY)}; {' '.join(copies)} mov.u32 $0, $1; }}"
    )


@gluon.jit
def send(TILE: gl.constexpr, PIECES: gl.constexpr, READY: gl.constexpr, link):
    """A warp sends what it has stored of a half, 64 columns a piece."""
    operands = (_each(link.own), _each(link.peer), _each(link.peer_barriers))
    _by_each_thread(_send_asm(TILE, PIECES, READY), operands)
