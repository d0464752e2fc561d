"""The epilogue of a tile: normalize, and write out, max_logits and lse."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashlatte.kernels.hopper.e4m3.steps import BLOCK_BYTES, OFFSET, in_order
from flashlatte.kernels.hopper.e4m3.tiles import SCORE_COLS, SCORE_ROWS
from flashlatte.kernels.hopper.mla_tiles import HALF, ROWS, SWIZZLED
from flashlatte.kernels.hopper.ptx.copies import store_evict_first
from flashlatte.kernels.hopper.ptx.registers import exp2
from flashlatte.kernels.triton.online_softmax import LN_2, LOG2_E
from flashlatte.ops.sparse_prefill.hopper.state import list_of
from flashlatte.runtime.gluon_compat import cta_barrier, reinterpret

# PTX name of the kernel's first parameter.
_OUT_DESCRIPTOR = gl.constexpr("sparse_prefill_fp8_kernel_param_0")


@gluon.jit
def start_store_out(args, out, tile, last, ODD: gl.constexpr):
    """Write half of the output to the slot of a consumer's own block of the last step, and start its TMA store.

    The slot must not be written until ``tma.store_wait(0)`` returns. ``last``: slot of the last block.
    """
    tiles, output = args.tiles, args.output
    head0 = (tile % args.work.head_blocks) * ROWS
    row_sum = tiles.row_sum0.load(SCORE_COLS) + tiles.row_sum1.load(SCORE_COLS)
    denominator = row_sum
    if output.sinks is not None:
        row_max = tiles.row_max.index(last).load(SCORE_COLS) - OFFSET
        head = head0 + gl.arange(0, ROWS, SCORE_COLS)
        sink = gl.load(output.sinks + head * output.sink_stride, mask=head < output.heads, other=float("-inf"))
        denominator += exp2(sink * LOG2_E - row_max)
    # Not "> 0": a row with a NaN among its keys is NaN.
    factor = (gl.where(row_sum != 0, 1.0 / denominator, 0.0) * args.k_scale)[None, :]
    slot = last - 1 + ODD
    DTYPE: gl.constexpr = args.queries.q.dtype.element_ty
    staging = reinterpret(tiles.k.latent.index(slot), DTYPE, [ROWS, HALF], SWIZZLED)
    for i in gl.static_range(4):
        values = in_order(out[i] * factor)
        staging.slice(i * 64, 64, dim=1).store(values.to(DTYPE))
    fence_async_shared()
    cta_barrier()
    store_evict_first(_OUT_DESCRIPTOR, tiles.k_offset + slot * BLOCK_BYTES, head0, list_of(args.work, tile), ODD * HALF)


@gluon.jit
def store_statistics(args, row_max, score_max, factor, tile):
    """Store lse and max_logits. ``score_max`` [64]: maximum of the unscaled scores; ``factor`` [64]: their scale."""
    output = args.output
    row_sum = args.tiles.row_sum0.load(SCORE_ROWS) + args.tiles.row_sum1.load(SCORE_ROWS)
    head = (tile % args.work.head_blocks) * ROWS + gl.arange(0, ROWS, SCORE_ROWS)
    row = list_of(args.work, tile).to(gl.int64) * output.heads + head
    seen = row_sum != 0
    max_logits = gl.where(seen, score_max * factor * LN_2, float("-inf"))
    log_sum = (row_max - OFFSET + gl.log2(row_sum)) * LN_2
    lse = gl.where(seen, log_sum, output.empty_lse)
    gl.store(output.max_logits + row, max_logits, mask=head < output.heads)
    gl.store(output.lse + row, lse, mask=head < output.heads)
