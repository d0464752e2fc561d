"""Copies between global and shared memory with hints that Gluon does not pass on, and turns at global memory.

Triton 3.6 to 3.8 take no eviction hint for copies between global and shared memory. Text assumes that the symbol
``global_smem`` is where the CTA's shared memory begins, as in what Triton 3.6 to 3.9 compile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.ptx.threads import one_each

# 16 rows of 128 bytes, 16 bytes a thread.
_PIECES = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
PIECE_ROWS = gl.constexpr(gl.SliceLayout(1, _PIECES))


@gluon.jit
def prefetch_l2(pointers):
    """Bring the lines that ``pointers`` lie in into the L2 cache."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(gl.int64)], gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _prefetch_boxes_asm(descriptor, first_column, columns):
    return (
        "{ .reg .pred one; .reg .b64 descriptor; .reg .b32 column; elect.sync _|one, -1; "
        f"mov.b64 descriptor, {descriptor}; cvta.param.u64 descriptor, descriptor; "
        f"mad.lo.u32 column, $1, 64, {first_column}; setp.lt.and.u32 one, column, {columns}, one; "
        "@one cp.async.bulk.prefetch.tensor.4d.L2.global.tile [descriptor, {column, $2, $3, $4}]; "
        "mov.u32 $0, 0; }"
    )


@gluon.jit
def prefetch_boxes(DESCRIPTOR: gl.constexpr, page, token, head, COLUMNS: gl.constexpr):
    """Have the copy engine bring COLUMNS numbers of some rows into the L2 cache, in boxes of 64 columns: each of four
    warps asks for every fourth.

    Args:
        DESCRIPTOR: name in PTX of the descriptor of boxes [1, rows, 1, 64] of two-byte numbers, as in ``store_once``.
        page, token, head: of the first row. Of what lies outside of the tensor nothing is read.
    """
    warp = gl.arange(0, 128, one_each(128)) // 32
    zero = gl.zeros_like(warp)
    for first in gl.static_range(0, COLUMNS, 256):
        gl.inline_asm_elementwise(
            _prefetch_boxes_asm(DESCRIPTOR, first, COLUMNS),
            "=r,r,r,r,r",
            [warp, zero + head, zero + token, zero + page],
            gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _evict_first():
    return gl.inline_asm_elementwise(
        "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", "=l", [], gl.int64, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _load_once_asm(columns):
    copies = " ".join(
        f"cp.async.cg.shared.global.L2::cache_hint [target + {8192 * line}], [$3 + {128 * line}], 16, $4, $5;"
        for line in range(columns // 64)
    )
    # The lane's exchange with itself keeps ptxas from adding a uniform register to the address. It may choose to, and
    # encodes that wrongly for copies with a hint: the instruction would be illegal.
    return (
        "{ .reg .b32 target; mov.u32 target, global_smem; add.u32 target, target, $1; add.u32 target, target, $2; "
        "shfl.sync.bfly.b32 target, target, 0, 31, -1; " + copies + " mov.u32 $0, 0; }"
    )


@gluon.jit
def load_once(pointers, inside, row, offset, COLUMNS: gl.constexpr):
    """Start copies of 16 rows of COLUMNS two-byte numbers into a tile [64, COLUMNS], swizzled by 128 bytes; they leave
    the L2 first.

    Args:
        pointers: to the rows [16], in ``PIECE_ROWS``; multiples of 16 bytes.
        inside: which rows there are [16]; zeros are copied for the others.
        row: which rows of the tile they are [16].
        offset: of the tile, in bytes from the start of shared memory.
    """
    row = row[:, None]
    piece = gl.arange(0, 8, gl.SliceLayout(0, _PIECES))[None, :]
    place = row * 128 + (piece ^ (row & 7)) * 16
    bytes_ = gl.zeros_like(place) + gl.where(inside, 16, 0)[:, None]
    policy = gl.zeros_like(place).to(gl.int64) + _evict_first()
    gl.inline_asm_elementwise(
        _load_once_asm(COLUMNS),
        "=r,r,r,l,r,l",
        [place, gl.zeros_like(place) + offset, pointers[:, None] + piece * 8, bytes_, policy],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _store_once_asm(descriptor, first_column):
    return (
        "{ .reg .pred one; .reg .b64 descriptor; .reg .b32 source, column; elect.sync _|one, -1; "
        f"mov.b64 descriptor, {descriptor}; cvta.param.u64 descriptor, descriptor; "
        "mov.u32 source, global_smem; add.u32 source, source, $1; "
        f"mad.lo.u32 source, $4, 8192, source; mad.lo.u32 column, $4, 64, {first_column}; "
        "@one cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint "
        "[descriptor, {column, $2, $3}], [source], $5; "
        "cp.async.bulk.commit_group; mov.u32 $0, 0; }"
    )


@gluon.jit
def store_once(DESCRIPTOR: gl.constexpr, offset, row, plane, FIRST_COLUMN: gl.constexpr):
    """Have the copy engine store a tile [64, 256], a box of 64 columns for each of four warps; it leaves the L2 first.

    The tile may be written again when ``tma.store_wait(0)`` returns. Rows beyond the descriptor's last are not stored.

    Args:
        DESCRIPTOR: name in PTX of the kernel's argument that is the descriptor of boxes [1, 64, 64]. Argument n of a
            kernel k is ``k_param_n`` in what Triton 3.6 to 3.9 compile; under another name the assembler fails.
        offset: of the tile, in bytes from the start of shared memory.
        row, plane: of the box.
    """
    thread = gl.arange(0, 128, one_each(128))
    zero = gl.zeros_like(thread)
    gl.inline_asm_elementwise(
        _store_once_asm(DESCRIPTOR, FIRST_COLUMN),
        "=r,r,r,r,r,l",
        [zero + offset, zero + row, zero + plane, thread // 32, zero.to(gl.int64) + _evict_first()],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def stores_read():
    """Wait until the copy engine has read all that this thread has asked it to store or to add."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group.read 0; mov.u32 $0, $1;",
        "=r,r",
        [gl.arange(0, 128, one_each(128))],
        gl.int32,
        is_pure=False,
        pack=1,
    )


# Labels in braces are local to them. The copy engine's additions are ordered with other accesses by proxy fences.
_TAKE_TURN = gl.constexpr("""
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
def take_turn(address, turn):
    """Wait until the int32 at ``address`` (int64, of each of 128 threads) is ``turn``."""
    gl.inline_asm_elementwise(_TAKE_TURN, "=r,l,r", [address, turn], gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(address):
    """Add 1 to the int32 at ``address``, once all that the copy engine was asked to add is there."""
    thread = gl.arange(0, 128, one_each(128))
    gl.inline_asm_elementwise(_PASS_TURN, "=r,l,r", [address, thread], gl.int32, is_pure=False, pack=1)


_FIRST_WORD = gl.constexpr(
    "{ .reg .pred inside; .reg .b32 size, address; "
    "mov.u32 size, %dynamic_smem_size; setp.lt.u32 inside, $1, size; "
    "mov.u32 address, global_smem; add.u32 address, address, $1; "
    "mov.u32 $0, 0; @inside ld.shared.u32 $0, [address]; }"
)


@gluon.jit
def shared_words(offsets):
    """The words of shared memory at ``offsets`` bytes from its start, 0 beyond its end."""
    return gl.inline_asm_elementwise(_FIRST_WORD, "=r,r", [offsets], gl.int32, is_pure=False, pack=1)
