"""What a consumer does with its half of a finished output: the result, or a partial output."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import HALF, ROWS
from flashlatte.kernels.hopper.neighbours import neighbours
from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.kernels.hopper.softmax import inverse, lse2_of
from flashlatte.kernels.triton.online_softmax import sink_weight
from flashlatte.ops.sparse_decode.hopper import equal_splits
from flashlatte.ops.sparse_decode.hopper.tiles import OUTPUT_ROWS
from flashlatte.split_kv.gluon import PARTIAL, write_partial
from flashlatte.split_kv.outputs import head_pointers, write_lse


class Results(NamedTuple):
    """Where they go.

    Attributes:
        outputs: ``outputs.Outputs``.
        scratch: all partial outputs, None where no work item is split; ``partials`` those of the CTA.
    """

    outputs: Any
    scratch: Any
    partials: Any


@gluon.jit
def write(state, item, split, call, FIRST_COL: gl.constexpr, PLAN: gl.constexpr):
    """Write columns from FIRST_COL of a work item's heads; those from 0 bring the lse along."""
    results, first_head = call.results, call.work.group * ROWS
    if PLAN.equal_splits:
        equal_splits.write(state, results.partials, results.outputs.heads - first_head, FIRST_COL)
    else:
        _write_normalised(state, item, split, first_head, results, FIRST_COL, PLAN.out_align)


@gluon.jit
def _write_normalised(state, item, split, first_head, results, FIRST_COL: gl.constexpr, OUT_ALIGN: gl.constexpr):
    outputs = results.outputs
    row_sum = gl.convert_layout(state.row_sum, OUTPUT_ROWS, assert_trivial=True)
    row_max = gl.convert_layout(state.row_max, OUTPUT_ROWS, assert_trivial=True)
    factor = inverse(row_sum)
    lse2 = lse2_of(row_max, row_sum)
    # What follows from it would be worked out before the main loop, and kept.
    row = opaque(gl.arange(0, ROWS, OUTPUT_ROWS))
    head = first_head + row
    if (split.begin == 0) & (split.end == split.blocks):
        if outputs.sink is not None:
            factor *= sink_weight(outputs.sink, outputs.sink_stride, head, head < outputs.heads, lse2, row_sum == 0)
        _write_out(outputs, item, first_head, state.out * factor[:, None], FIRST_COL, OUT_ALIGN)
        if FIRST_COL == 0:
            write_lse(outputs, item, 0, head, lse2)
    elif results.partials is not None:
        # A range's first partial output is of an item begun before it, the second one of an item that it begins.
        partial = results.partials + gl.where(split.begin > 0, 0, PARTIAL)
        write_partial(partial, row, head < outputs.heads, state.out * factor[:, None], lse2, FIRST_COL)


@gluon.jit
def _write_out(outputs, item, first_head, values, FIRST_COL: gl.constexpr, OUT_ALIGN: gl.constexpr):
    values = neighbours(values.to(outputs.out.dtype.element_ty))
    LAYOUT: gl.constexpr = values.type.layout
    head = first_head + opaque(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)))
    col = FIRST_COL + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    pointers = head_pointers(outputs, item, head, OUT_ALIGN)[:, None] + col[None, :]
    gl.store(pointers, values, mask=(head < outputs.heads)[:, None])
