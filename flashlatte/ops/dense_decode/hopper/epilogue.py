"""What a consumer does with its half of a finished output: the result, or a partial one for the combine kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.ops.dense_decode.hopper import schedule, wide_store
from flashlatte.ops.dense_decode.hopper.tiles import HALF, LATENT, OUTPUT_COLS, OUTPUT_ROWS, ROWS
from flashlatte.schedule import output_rows


class Results(NamedTuple):
    """``outputs``: ``output_rows.Outputs``. ``scratch``: records of partial results, None where no request is split."""

    outputs: Any
    scratch: Any


class Share(NamedTuple):
    """What a program had of a request: whether the part before it began it, and whether it had the whole."""

    item: Any
    continues: Any
    is_whole: Any


@gluon.jit
def write(
    output,
    reference,
    total,
    share,
    place,
    results,
    FIRST_COL: gl.constexpr,
    PLAN: gl.constexpr,
    OUT_ALIGN: gl.constexpr,
):
    """Normalise and write columns from FIRST_COL of a request's rows; those from 0 bring the lse along.

    ``reference`` and ``total`` [64] are in the scores' layout, the reference in base 2.
    """
    total = gl.convert_layout(total, OUTPUT_ROWS)
    reference = gl.convert_layout(reference, OUTPUT_ROWS)
    is_empty = total == 0
    values = output * gl.where(is_empty, 0.0, 1.0 / total)[:, None]
    lse2 = gl.where(is_empty, float("-inf"), reference + gl.log2(total))
    row = gl.arange(0, ROWS, OUTPUT_ROWS)
    col = FIRST_COL + gl.arange(0, HALF, OUTPUT_COLS)
    item_row = place.group.first_row + row
    if share.is_whole:
        if OUT_ALIGN > 1:
            wide_store.store_halves(
                output_rows.row_pointers(results.outputs, share.item, place.group.kv_head, item_row, OUT_ALIGN)
                + FIRST_COL,
                item_row < results.outputs.rows,
                values.to(results.outputs.out.dtype.element_ty),
            )
        else:
            output_rows.write_out(
                results.outputs, share.item, place.group.kv_head, item_row, col, values, lse2, LATENT, OUT_ALIGN, False
            )
        if FIRST_COL == 0:
            output_rows.write_lse(results.outputs, share.item, place.group.kv_head, item_row, lse2)
    elif results.scratch is not None:
        record = schedule.record(place, share.continues, PLAN)
        base = results.scratch + record * (ROWS * (LATENT + 1))
        in_use = item_row < results.outputs.rows
        gl.store(base + (row * LATENT)[:, None] + col[None, :], values, mask=in_use[:, None])
        if FIRST_COL == 0:
            gl.store(base + ROWS * LATENT + row, lse2, mask=in_use)
