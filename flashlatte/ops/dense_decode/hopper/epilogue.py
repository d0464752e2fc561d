"""The epilogue of a consumer: write half of the output as a result or as a partial output."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import HALF, LATENT, OUTPUT_COLS, OUTPUT_ROWS, ROWS
from flashlatte.kernels.hopper.ptx.output_tiles import store_rows
from flashlatte.kernels.hopper.softmax import inverse, lse2_of
from flashlatte.ops.dense_decode.hopper import fixup, schedule
from flashlatte.split_kv.fp24_partials import PARTIAL as FP24_PARTIAL
from flashlatte.split_kv.fp24_partials import write as write_fp24
from flashlatte.split_kv.gluon_device import PARTIAL, write_partial
from flashlatte.split_kv.outputs import row_pointers, write_lse, write_out


class DenseDecodeResults(NamedTuple):
    """Outputs and scratch.

    Attributes:
        outputs: ``outputs.Outputs``.
        scratch: partial outputs for ``fixup`` or a combine kernel; None if no request is split.
        k_scale: scale of one-byte cache elements; None for two-byte elements.
    """

    outputs: Any
    scratch: Any
    k_scale: Any


@gluon.jit
def write(state, split, args, FIRST_COL: gl.constexpr, CONFIG: gl.constexpr):
    """Normalize and write columns from FIRST_COL of a request's rows; with FIRST_COL 0, also write the lse."""
    OUT_ALIGN: gl.constexpr = CONFIG.out_align
    work, results, outputs = args.work, args.results, args.results.outputs
    continues = split.begin > 0
    ends = split.end == split.steps
    out = state.out
    row_sum = gl.convert_layout(state.row_sum, OUTPUT_ROWS)
    row_max = gl.convert_layout(state.row_max, OUTPUT_ROWS)
    is_result = continues == 0
    continues_later = ends == 0
    if CONFIG.stream_k:
        out, row_max, row_sum, continues_later = fixup.add_later_splits(
            out, row_max, row_sum, is_result, continues_later, args, FIRST_COL
        )
    else:
        is_result = is_result & ends
    factor = inverse(row_sum)
    if results.k_scale is not None:
        # ``fixup`` adds partial outputs to unscaled sums, so they stay unscaled.
        factor *= gl.where(is_result, results.k_scale, 1.0) if CONFIG.stream_k else results.k_scale
    values = out * factor[:, None]
    lse2 = lse2_of(row_max, row_sum)
    row = gl.arange(0, ROWS, OUTPUT_ROWS)
    if CONFIG.stream_k or CONFIG.one_byte:
        # An artificial dependence on the request prevents the compiler from hoisting values derived from ``row`` out of
        # the loop, where they would occupy registers.
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
            write_out(outputs, split.item, work.group.kv_head, item_row, col, values, lse2, LATENT, OUT_ALIGN)
        if FIRST_COL == 0:
            write_lse(outputs, split.item, work.group.kv_head, item_row, lse2)
    elif CONFIG.stream_k:
        fixup.store_partial(values, lse2, continues_later, args, FIRST_COL)
    elif CONFIG.fp24_partials:
        if results.k_scale is not None:
            out *= results.k_scale
        partial = results.scratch + schedule.partial(work, continues, CONFIG) * FP24_PARTIAL
        write_fp24(out, row_max, row_sum, partial, outputs.rows - work.group.first_row, FIRST_COL)
    elif results.scratch is not None:
        partial = results.scratch + schedule.partial(work, continues, CONFIG) * PARTIAL
        write_partial(partial, row, item_row < outputs.rows, values, lse2, FIRST_COL)
