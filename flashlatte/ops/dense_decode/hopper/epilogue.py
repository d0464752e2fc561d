"""What a consumer does with its half of a finished output: the result, or a partial output."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import HALF, LATENT, OUTPUT_COLS, OUTPUT_ROWS, ROWS
from flashlatte.kernels.hopper.ptx.outputs import store_rows
from flashlatte.kernels.hopper.softmax import inverse, lse2_of
from flashlatte.ops.dense_decode.hopper import fixup, schedule
from flashlatte.split_kv.gluon import PARTIAL, write_partial
from flashlatte.split_kv.outputs import row_pointers, write_lse, write_out
from flashlatte.split_kv.rounded_partials import PARTIAL as ROUNDED_PARTIAL
from flashlatte.split_kv.rounded_partials import write as write_rounded


class Results(NamedTuple):
    """Where they go.

    Attributes:
        outputs: ``outputs.Outputs``.
        scratch: partial outputs, for ``fixup`` or a combine kernel; None where no request is split.
        k_scale: what numbers of the cache are multiplied with, None where they are two bytes wide.
    """

    outputs: Any
    scratch: Any
    k_scale: Any


@gluon.jit
def write(state, split, call, FIRST_COL: gl.constexpr, PLAN: gl.constexpr):
    """Normalise and write columns from FIRST_COL of a request's rows; those from 0 bring the lse along."""
    OUT_ALIGN: gl.constexpr = PLAN.out_align
    work, results, outputs = call.work, call.results, call.results.outputs
    continues = split.begin > 0
    ends = split.end == split.steps
    out = state.out
    row_sum = gl.convert_layout(state.row_sum, OUTPUT_ROWS)
    row_max = gl.convert_layout(state.row_max, OUTPUT_ROWS)
    is_result = continues == 0
    goes_on = ends == 0
    if PLAN.stream_k:
        out, row_max, row_sum, goes_on = fixup.add_later_splits(
            out, row_max, row_sum, is_result, goes_on, call, FIRST_COL
        )
    else:
        is_result = is_result & ends
    factor = inverse(row_sum)
    if results.k_scale is not None:
        # Partial outputs that ``fixup`` adds stay unscaled, as the sums that they are added to.
        factor *= gl.where(is_result, results.k_scale, 1.0) if PLAN.stream_k else results.k_scale
    values = out * factor[:, None]
    lse2 = lse2_of(row_max, row_sum)
    row = gl.arange(0, ROWS, OUTPUT_ROWS)
    if PLAN.stream_k or PLAN.one_byte:
        # Made to look as if it depended on the request: else what follows from it would be worked out before the loop,
        # and lie in registers over all steps.
        row += split.item >> 31
    item_row = work.group.first_row + row
    if is_result:
        if OUT_ALIGN > 1:
            # Stores of 16 bytes win "b 128, s_q 1" by 3% (276 instead of 284 µs, with dependent launch;
            # docs/notes/dense-decode.md).
            store_rows(
                row_pointers(outputs, split.item, work.group.kv_head, item_row, OUT_ALIGN) + FIRST_COL,
                item_row < outputs.rows,
                values.to(outputs.out.dtype.element_ty),
            )
        else:
            col = FIRST_COL + gl.arange(0, HALF, OUTPUT_COLS)
            write_out(outputs, split.item, work.group.kv_head, item_row, col, values, lse2, LATENT, OUT_ALIGN, False)
        if FIRST_COL == 0:
            write_lse(outputs, split.item, work.group.kv_head, item_row, lse2)
    elif PLAN.stream_k:
        fixup.leave(values, lse2, goes_on, call, FIRST_COL)
    elif PLAN.rounded:
        if results.k_scale is not None:
            out *= results.k_scale
        partial = results.scratch + schedule.partial(work, continues, PLAN) * ROUNDED_PARTIAL
        write_rounded(out, row_max, row_sum, partial, outputs.rows - work.group.first_row, FIRST_COL)
    elif results.scratch is not None:
        partial = results.scratch + schedule.partial(work, continues, PLAN) * PARTIAL
        write_partial(partial, row, item_row < outputs.rows, values, lse2, FIRST_COL)
