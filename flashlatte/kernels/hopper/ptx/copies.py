"""Copies between global and shared memory with cache hints, prefetches into L2, and semaphores in global memory.

Triton 3.6 to 3.8 have no eviction hint for copies between global and shared memory. The code assumes that the symbol
``global_smem`` is the start of the CTA's shared memory, as in the PTX of Triton 3.6 to 3.9.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.ptx.threads import one_per_thread

# 16 rows of 128 bytes, 16 bytes per thread.
_PIECES = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
PIECE_ROWS = gl.constexpr(gl.SliceLayout(1, _PIECES))


@gluon.jit
def prefetch_l2(pointers):
    """Prefetch the cache lines of ``pointers`` into L2."""
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
def prefetch_boxes_l2(DESCRIPTOR: gl.constexpr, page, token, head, COLUMNS: gl.constexpr):
    """Prefetch COLUMNS elements of a box's rows into L2 by TMA, in boxes of 64 columns: each of four warps issues every
    fourth box.

    Args:
        DESCRIPTOR: PTX name of the descriptor of boxes [1, rows, 1, 64] of two-byte elements, as in
            ``store_evict_first``.
        page, token, head: coordinates of the first row. Nothing outside of the tensor is read.
    """
    warp = gl.arange(0, 128, one_per_thread(128)) // 32
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
def _load_evict_first_asm(columns):
    copies = " ".join(
        f"cp.async.cg.shared.global.L2::cache_hint [target + {8192 * line}], [$3 + {128 * line}], 16, $4, $5;"
        for line in range(columns // 64)
    )
    # The shuffle of a lane with itself prevents a uniform register in the address, which ptxas encodes wrongly for
    # copies with a hint: the instruction would be illegal.
    return (
        "{ .reg .b32 target; mov.u32 target, global_smem; add.u32 target, target, $1; add.u32 target, target, $2; "
        "shfl.sync.bfly.b32 target, target, 0, 31, -1; " + copies + " mov.u32 $0, 0; }"
    )


@gluon.jit
def load_evict_first(pointers, inside, row, offset, COLUMNS: gl.constexpr):
    """Start copies (cp.async) of 16 rows of COLUMNS two-byte elements into a tile [64, COLUMNS] with a 128-byte
    swizzle, with L2 priority evict_first.

    Args:
        pointers: pointers to the rows [16], in layout ``PIECE_ROWS``; multiples of 16 bytes.
        inside: which rows exist [16]; the others are filled with zeros.
        row: their row numbers in the tile [16].
        offset: offset of the tile, in bytes from the start of shared memory.
    """
    row = row[:, None]
    piece = gl.arange(0, 8, gl.SliceLayout(0, _PIECES))[None, :]
    offset_in_tile = row * 128 + (piece ^ (row & 7)) * 16
    copied_bytes = gl.zeros_like(offset_in_tile) + gl.where(inside, 16, 0)[:, None]
    policy = gl.zeros_like(offset_in_tile).to(gl.int64) + _evict_first()
    gl.inline_asm_elementwise(
        _load_evict_first_asm(COLUMNS),
        "=r,r,r,l,r,l",
        [offset_in_tile, gl.zeros_like(offset_in_tile) + offset, pointers[:, None] + piece * 8, copied_bytes, policy],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _store_evict_first_asm(descriptor, first_column):
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
def store_evict_first(DESCRIPTOR: gl.constexpr, offset, row, plane, FIRST_COLUMN: gl.constexpr):
    """Store a tile [64, 256] by TMA, one box of 64 columns per warp, with L2 priority evict_first.

    The tile may be overwritten after ``tma.store_wait(0)``. Rows outside of the descriptor's bounds are not stored.

    Args:
        DESCRIPTOR: PTX name of the kernel parameter with the descriptor of boxes [1, 64, 64]. Triton 3.6 to 3.9 name
            parameter n of a kernel k ``k_param_n``; with another name, ptxas fails.
        offset: offset of the tile, in bytes from the start of shared memory.
        row, plane: coordinates of the box.
    """
    thread = gl.arange(0, 128, one_per_thread(128))
    zero = gl.zeros_like(thread)
    gl.inline_asm_elementwise(
        _store_evict_first_asm(DESCRIPTOR, FIRST_COLUMN),
        "=r,r,r,r,r,l",
        [zero + offset, zero + row, zero + plane, thread // 32, zero.to(gl.int64) + _evict_first()],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_stores_read():
    """Wait until the bulk stores and reductions of this thread have read their source."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group.read 0; mov.u32 $0, $1;",
        "=r,r",
        [gl.arange(0, 128, one_per_thread(128))],
        gl.int32,
        is_pure=False,
        pack=1,
    )


# Labels in braces are local. Proxy fences order TMA reductions with other accesses.
_SEMAPHORE_WAIT = gl.constexpr("""
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
_SEMAPHORE_RELEASE = gl.constexpr("""
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
def semaphore_wait(address, value):
    """Wait until the int32 at ``address`` (int64, for each of 128 threads) equals ``value``."""
    gl.inline_asm_elementwise(_SEMAPHORE_WAIT, "=r,l,r", [address, value], gl.int32, is_pure=False, pack=1)


@gluon.jit
def semaphore_release(address):
    """Add 1 to the int32 at ``address`` after the bulk reductions of the thread have completed."""
    thread = gl.arange(0, 128, one_per_thread(128))
    gl.inline_asm_elementwise(_SEMAPHORE_RELEASE, "=r,l,r", [address, thread], gl.int32, is_pure=False, pack=1)


_FIRST_WORD = gl.constexpr(
    "{ .reg .pred inside; .reg .b32 size, address; "
    "mov.u32 size, %dynamic_smem_size; setp.lt.u32 inside, $1, size; "
    "mov.u32 address, global_smem; add.u32 address, address, $1; "
    "mov.u32 $0, 0; @inside ld.shared.u32 $0, [address]; }"
)


@gluon.jit
def load_shared_words(offsets):
    """Load the words at byte ``offsets`` of shared memory; 0 beyond its end."""
    return gl.inline_asm_elementwise(_FIRST_WORD, "=r,r", [offsets], gl.int32, is_pure=False, pack=1)
