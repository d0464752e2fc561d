"""What a consumer does with its half of a finished output: the result, or a partial one for who merges."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import HALF, LATENT, OUTPUT_COLS, OUTPUT_ROWS, ROWS
from flashlatte.kernels.hopper.softmax import rescale
from flashlatte.ops.dense_decode.hopper import partial, schedule, wide_store
from flashlatte.split_kv import output_rows


class Results(NamedTuple):
    """Where they go.

    Attributes:
        outputs: ``output_rows.Outputs``.
        scratch: records of partial results for the combine kernel, None where no request is split.
        records: those that pass from part to part (``partial.Records``), None where the combine kernel merges.
    """

    outputs: Any
    scratch: Any
    records: Any


class Share(NamedTuple):
    """What a program had of a request: whether a part before it began it, and whether it had its last keys."""

    item: Any
    continues: Any
    ends: Any


@gluon.jit
def _add_rest(output, reference, total, is_result, goes_on, records, FIRST_COL: gl.constexpr):
    """Add what the next parts have of a request, and tell whether it goes on still.

    Who begins a request adds all of it; the others gather for it, as in a Fenwick tree: part p of p up to p plus the
    lowest bit of p, so that of a request over many parts nobody has many records to add.
    """
    number = records.part + 1
    stop = gl.where(is_result, records.parts, records.part + (records.part & -records.part))
    while goes_on & (number < stop):
        record = partial.at(records, number)
        goes_on = partial.wait(record)
        lse2 = partial.load_lse(record)
        raised = gl.maximum(reference, lse2)
        weight = gl.exp2(lse2 - raised)
        decay = gl.exp2(reference - raised)
        total = total * decay + weight
        output = partial.add(rescale(output, decay), record, weight, FIRST_COL)
        reference = raised
        number += number & -number
    return output, reference, total, goes_on


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
    is_result = share.continues == 0
    goes_on = share.ends == 0
    if PLAN.passes_on:
        output, reference, total, goes_on = _add_rest(
            output, reference, total, is_result, goes_on, results.records, FIRST_COL
        )
    else:
        is_result = is_result & share.ends
    is_empty = total == 0
    values = output * gl.where(is_empty, 0.0, 1.0 / total)[:, None]
    lse2 = gl.where(is_empty, float("-inf"), reference + gl.log2(total))
    row = gl.arange(0, ROWS, OUTPUT_ROWS)
    if PLAN.passes_on:
        # As if it depended on the request, or what follows from it would lie in registers over all steps.
        row += share.item >> 31
    col = FIRST_COL + gl.arange(0, HALF, OUTPUT_COLS)
    item_row = place.group.first_row + row
    if is_result:
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
    elif PLAN.passes_on:
        record = partial.at(results.records, results.records.part)
        partial.leave(record, values, lse2, goes_on, FIRST_COL)
    elif results.scratch is not None:
        record = schedule.record(place, share.continues, PLAN)
        base = results.scratch + record * (ROWS * (LATENT + 1))
        in_use = item_row < results.outputs.rows
        gl.store(base + (row * LATENT)[:, None] + col[None, :], values, mask=in_use[:, None])
        if FIRST_COL == 0:
            gl.store(base + ROWS * LATENT + row, lse2, mask=in_use)
