"""Rows of float32 that a WGMMA left in registers, staged in shared memory and added to rows of global memory by TMA.

A warp stages its own 16 rows of a tile, and adds them itself: no other warp has to wait. The code assumes that the
symbol ``global_smem`` is the start of the CTA's shared memory, as in the PTX of Triton 3.6 to 3.9.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.ptx.threads import one_per_thread

# Columns that are staged at a time.
STAGED_COLUMNS = gl.constexpr(128)
# Bytes from one staged row to the next: 32 more than the row, so that four rows use different banks.
STAGED_STRIDE = gl.constexpr(4 * 128 + 32)
_ROWS_OF_WARP = gl.constexpr(16)


@gluon.constexpr_function
def _stage_asm(elements, first, columns):
    # Operands: unused results, a byte for each element; the elements; and for each the offset of its row. A thread has
    # two columns of each eight, in two rows.
    unused = elements // 4
    row = {half: f"${unused + elements + 2 * half}" for half in range(2)}
    code = [
        "{ .reg .b32 first, second, lane; mov.u32 lane, %laneid; and.b32 lane, lane, 3; shl.b32 lane, lane, 3;",
        "mov.u32 first, global_smem; add.u32 lane, lane, first;",
        f"add.u32 first, lane, {row[0]}; add.u32 second, lane, {row[1]};",
    ]
    for eight in range(columns // 8):
        at = unused + 4 * (first // 8 + eight)
        code.append(f"st.shared.v2.f32 [first + {32 * eight}], {{${at}, ${at + 1}}};")
        code.append(f"st.shared.v2.f32 [second + {32 * eight}], {{${at + 2}, ${at + 3}}};")
    return " ".join([*code, "}"])


@gluon.constexpr_function
def _stage_constraints(elements):
    return ",".join(["=r"] * (elements // 4) + ["f"] * elements + ["r"] * elements)


@gluon.jit
def stage_rows(tile, offset, FIRST: gl.constexpr):
    """Write up to STAGED_COLUMNS columns, from FIRST on, of a WGMMA result [64, n] of four warps to shared memory.

    Row i begins at ``offset`` + i · STAGED_STRIDE. Only the warp that wrote a row may read it before a barrier.
    """
    ELEMENTS: gl.constexpr = tile.shape[0] * tile.shape[1] // 128
    COLUMNS: gl.constexpr = min(tile.shape[1] - FIRST, STAGED_COLUMNS)
    row = gl.arange(0, 64, gl.SliceLayout(1, tile.type.layout))
    gl.inline_asm_elementwise(
        _stage_asm(ELEMENTS, FIRST, COLUMNS),
        _stage_constraints(ELEMENTS),
        [tile, (offset + row * STAGED_STRIDE)[:, None]],
        gl.int8,
        is_pure=False,
        pack=ELEMENTS,
    )


@gluon.jit
def row_of_thread():
    """The row of a tile [64, n] that each of 128 threads sends, or -1 for those that send none: 16 rows of a warp by
    its first 16 lanes."""
    thread = gl.arange(0, 128, one_per_thread(128))
    row = thread // 32 * _ROWS_OF_WARP + thread % 32
    return gl.where(thread % 32 < _ROWS_OF_WARP, row, -1)


@gluon.constexpr_function
def _send_asm(columns, add):
    copy = (
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
        if add
        else ("cp.async.bulk.global.shared::cta.bulk_group")
    )
    return (
        "{ .reg .pred sends; .reg .b32 source; setp.ne.s32 sends, $3, 0; "
        "mov.u32 source, global_smem; add.u32 source, source, $2; "
        f"@sends {copy} [$1], [source], {4 * columns}; cp.async.bulk.commit_group; mov.u32 $0, 0; }}"
    )


@gluon.jit
def send_rows(target, offset, row, sends, COLUMNS: gl.constexpr, ADD: gl.constexpr):
    """Add COLUMNS float32 of staged rows to global memory by TMA, or store them if not ADD.

    The staged rows may be overwritten after ``copies.wait_stores_read()``.

    Args:
        target: for each of 128 threads, a pointer to the row's elements, a multiple of 16 bytes.
        offset: as in ``stage_rows``.
        row: ``row_of_thread``.
        sends: which threads send their row.
    """
    gl.inline_asm_elementwise(
        _send_asm(COLUMNS, ADD),
        "=r,l,r,r",
        [target.to(gl.int64), offset + row * STAGED_STRIDE, sends.to(gl.int32)],
        gl.int32,
        is_pure=False,
        pack=1,
    )
