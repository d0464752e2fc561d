"""The epilogue: write half of the transposed output as a result or as a partial output."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.e4m3.steps import OFFSET, in_order
from flashlatte.kernels.hopper.e4m3.tiles import SCORE_COLS
from flashlatte.kernels.hopper.mla_tiles import HALF, LATENT, ROWS
from flashlatte.kernels.hopper.softmax import inverse, lse2_of
from flashlatte.ops.dense_decode.hopper import schedule
from flashlatte.split_kv.gluon_device import PARTIAL, write_partial
from flashlatte.split_kv.outputs import row_pointers, write_lse, write_out


@gluon.constexpr_function
def _store_layout(register_bases, lane_bases):
    """A layout of [64 rows, 64 columns]."""
    return gl.DistributedLinearLayout(register_bases, lane_bases, [[0, 16], [0, 32]], block_bases=[], shape=[64, 64])


# A thread holds two adjacent columns of a product, and eight for stores of 16 bytes.
_FOUR_COLUMNS = gl.constexpr(
    _store_layout([[0, 1], [0, 2], [1, 0], [16, 0], [32, 0]], [[2, 0], [4, 0], [8, 0], [0, 4], [0, 8]])
)
_EIGHT_COLUMNS = gl.constexpr(
    _store_layout([[0, 1], [0, 2], [0, 4], [1, 0], [32, 0]], [[2, 0], [4, 0], [8, 0], [16, 0], [0, 8]])
)


@gluon.jit
def _write_result(values, row, lse2, split, args, FIRST_COL: gl.constexpr, OUT_ALIGN: gl.constexpr):
    """Write columns FIRST_COL to FIRST_COL + 63 of a result; in aligned rows by stores of 16 bytes, before which two
    conversions of the layout exchange columns between lanes."""
    outputs, kv_head = args.results.outputs, args.work.group.kv_head
    LAYOUT: gl.constexpr = _EIGHT_COLUMNS if OUT_ALIGN > 1 else values.type.layout
    item_row = args.work.group.first_row + gl.convert_layout(row, gl.SliceLayout(1, LAYOUT))
    col = FIRST_COL + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    if OUT_ALIGN > 1:
        values = values.to(outputs.out.dtype.element_ty)
        values = gl.convert_layout(gl.convert_layout(values, _FOUR_COLUMNS), _EIGHT_COLUMNS)
        pointers = row_pointers(outputs, split.item, kv_head, item_row, OUT_ALIGN)
        in_use, col = gl.broadcast((item_row < outputs.rows)[:, None], col[None, :])
        gl.store(pointers[:, None] + col, values, mask=in_use)
    else:
        write_out(outputs, split.item, kv_head, item_row, col, values, lse2, LATENT, OUT_ALIGN)


@gluon.jit
def _write_partial(values, row, lse2, partial, args, FIRST_COL: gl.constexpr):
    """Write columns FIRST_COL to FIRST_COL + 63 of a partial output."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, values.type.layout)
    row = gl.convert_layout(row, LAYOUT, assert_trivial=True)
    lse2 = gl.convert_layout(lse2, LAYOUT, assert_trivial=True)
    in_use = args.work.group.first_row + row < args.results.outputs.rows
    write_partial(partial, row, in_use, values, lse2, FIRST_COL)


@gluon.jit
def write(out, split, args, last, ODD: gl.constexpr, CONFIG: gl.constexpr):
    """Normalize and write half of a request's output. ``last``: slot of its last block. The left half also writes the
    lse."""
    tiles, work, results, outputs = args.tiles, args.work, args.results, args.results.outputs
    row_sum = tiles.row_sum0.load(SCORE_COLS) + tiles.row_sum1.load(SCORE_COLS)
    factor = (inverse(row_sum) * results.k_scale)[None, :]
    lse2 = lse2_of(tiles.row_max.index(last).load(SCORE_COLS) - OFFSET, row_sum)
    # An artificial dependence on the request prevents the compiler from hoisting values derived from ``row`` out of the
    # loop, where they would occupy registers.
    row = (split.item >> 31) + gl.arange(0, ROWS, SCORE_COLS)
    continues = split.begin > 0
    if (continues == 0) & (split.end == split.steps):
        for i in gl.static_range(4):
            values = in_order(out[i] * factor)
            _write_result(values, row, lse2, split, args, ODD * HALF + i * 64, CONFIG.out_align)
        if not ODD:
            write_lse(outputs, split.item, work.group.kv_head, work.group.first_row + row, lse2)
    elif results.scratch is not None:
        partial = results.scratch + schedule.partial(work, continues, CONFIG) * PARTIAL
        for i in gl.static_range(4):
            _write_partial(in_order(out[i] * factor), row, lse2, partial, args, ODD * HALF + i * 64)
