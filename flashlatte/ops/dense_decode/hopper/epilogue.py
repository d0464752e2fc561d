"""What a consumer does with its half of a finished output: the result, or a partial output."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import HALF, LATENT, OUTPUT_COLS, OUTPUT_ROWS, ROWS
from flashlatte.kernels.hopper.ptx.outputs import store_rows
from flashlatte.ops.dense_decode.hopper import fixup, schedule
from flashlatte.split_kv.outputs import row_pointers, write_lse, write_out


class Results(NamedTuple):
    """Where they go.

    Attributes:
        outputs: ``outputs.Outputs``.
        scratch: partial outputs for the combine kernel, None where no request is split.
        unit: what a number of the cache stands for, None for 1.
        partials: those of the stream-K fixup (``fixup.Partials``), None where the combine kernel combines.
    """

    outputs: Any
    scratch: Any
    unit: Any
    partials: Any


@gluon.jit
def write(state, split, work, results, FIRST_COL: gl.constexpr, PLAN: gl.constexpr):
    """Normalise and write columns from FIRST_COL of a request's rows; those from 0 bring the lse along."""
    OUT_ALIGN: gl.constexpr = PLAN.out_align
    continues = split.begin > 0
    ends = split.end == split.steps
    out = state.out
    row_sum = gl.convert_layout(state.row_sum, OUTPUT_ROWS)
    row_max = gl.convert_layout(state.row_max, OUTPUT_ROWS)
    is_result = continues == 0
    goes_on = ends == 0
    if PLAN.stream_k:
        out, row_max, row_sum, goes_on = fixup.add_later_splits(
            out, row_max, row_sum, is_result, goes_on, results.partials, FIRST_COL
        )
    else:
        is_result = is_result & ends
    is_empty = row_sum == 0
    weight = gl.where(is_empty, 0.0, 1.0 / row_sum)
    if results.unit is not None:
        # Partial outputs that ``fixup`` adds are sums of numbers as they are in the cache.
        weight *= gl.where(is_result, results.unit, 1.0) if PLAN.stream_k else results.unit
    values = out * weight[:, None]
    lse2 = gl.where(is_empty, float("-inf"), row_max + gl.log2(row_sum))
    row = gl.arange(0, ROWS, OUTPUT_ROWS)
    if PLAN.stream_k or PLAN.one_byte:
        # As if it depended on the request, or what follows from it would lie in registers over all steps.
        row += split.item >> 31
    col = FIRST_COL + gl.arange(0, HALF, OUTPUT_COLS)
    item_row = work.group.first_row + row
    if is_result:
        if OUT_ALIGN > 1:
            # With dependent launch "b 128, s_q 1" gains 3% by it (276 instead of 284 us; docs/notes/dense-decode.md).
            store_rows(
                row_pointers(results.outputs, split.item, work.group.kv_head, item_row, OUT_ALIGN) + FIRST_COL,
                item_row < results.outputs.rows,
                values.to(results.outputs.out.dtype.element_ty),
            )
        else:
            write_out(
                results.outputs, split.item, work.group.kv_head, item_row, col, values, lse2, LATENT, OUT_ALIGN, False
            )
        if FIRST_COL == 0:
            write_lse(results.outputs, split.item, work.group.kv_head, item_row, lse2)
    elif PLAN.stream_k:
        fixup.leave(results.partials, values, lse2, goes_on, FIRST_COL)
    elif results.scratch is not None:
        partial = results.scratch + schedule.partial(work, continues, PLAN) * schedule.PARTIAL
        in_use = item_row < results.outputs.rows
        gl.store(partial + (row * LATENT)[:, None] + col[None, :], values, mask=in_use[:, None])
        if FIRST_COL == 0:
            gl.store(partial + ROWS * LATENT + row, lse2, mask=in_use)
