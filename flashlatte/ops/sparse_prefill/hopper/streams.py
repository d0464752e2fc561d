"""Copies of what a call touches once, q and out: they leave the L2 first, so that rows of kv stay there.

Triton 3.6 to 3.8 have no such hint for copies between global and shared memory, so these are inline PTX.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# 16 rows of 128 bytes, 16 bytes a thread.
_PIECES = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
QUERY_ROWS = gl.constexpr(gl.SliceLayout(1, _PIECES))
_THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.constexpr_function
def _load_instructions(columns):
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


@gluon.constexpr_function
def _store_instructions(first_column):
    # The descriptor of out is the kernel's first argument.
    return (
        "{ .reg .pred one; .reg .b64 descriptor; .reg .b32 source, column; elect.sync _|one, -1; "
        "mov.b64 descriptor, sparse_prefill_kernel_param_0; cvta.param.u64 descriptor, descriptor; "
        "mov.u32 source, global_smem; add.u32 source, source, $1; "
        f"mad.lo.u32 source, $4, 8192, source; mad.lo.u32 column, $4, 64, {first_column}; "
        "@one cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint "
        "[descriptor, {column, $2, $3}], [source], $5; "
        "cp.async.bulk.commit_group; mov.u32 $0, 0; }"
    )


@gluon.jit
def _evict_first():
    return gl.inline_asm_elementwise(
        "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", "=l", [], gl.int64, is_pure=True, pack=1
    )


@gluon.jit
def load_once(pointers, inside, row, offset, COLUMNS: gl.constexpr):
    """Start copies of 16 rows of COLUMNS two-byte numbers into a tile [64, COLUMNS], swizzled by 128 bytes.

    Args:
        pointers: to the rows [16], in ``QUERY_ROWS``; multiples of 16 bytes.
        inside: which rows there are [16]; zeros are copied for the others.
        row: which rows of the tile they are [16].
        offset: of the tile, from the start of shared memory.
    """
    row = row[:, None]
    piece = gl.arange(0, 8, gl.SliceLayout(0, _PIECES))[None, :]
    place = row * 128 + (piece ^ (row & 7)) * 16
    bytes_ = gl.zeros_like(place) + gl.where(inside, 16, 0)[:, None]
    policy = gl.zeros_like(place).to(gl.int64) + _evict_first()
    gl.inline_asm_elementwise(
        _load_instructions(COLUMNS),
        "=r,r,r,l,r,l",
        [place, gl.zeros_like(place) + offset, pointers[:, None] + piece * 8, bytes_, policy],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store_once(offset, head, token, FIRST_COLUMN: gl.constexpr):
    """Have the copy engine store a tile [64, 256] of out, a box of 64 columns for each of four warps.

    The tile may be written again when ``tma.store_wait(0)`` returns. Heads beyond the last are not stored.
    """
    thread = gl.arange(0, 128, _THREADS)
    zero = gl.zeros_like(thread)
    gl.inline_asm_elementwise(
        _store_instructions(FIRST_COLUMN),
        "=r,r,r,r,r,l",
        [zero + offset, zero + head, zero + token, thread // 32, zero.to(gl.int64) + _evict_first()],
        gl.int32,
        is_pure=False,
        pack=1,
    )
