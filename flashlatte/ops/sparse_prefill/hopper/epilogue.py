"""The epilogue of a tile: normalize, and write out, max_logits and lse."""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashlatte.kernels.hopper.mla_tiles import OUTPUT_ROWS, SCORE_ROWS
from flashlatte.kernels.hopper.ptx.copies import store_evict_first
from flashlatte.kernels.triton.online_softmax import LN_2, LOG2_E
from flashlatte.ops.sparse_prefill.hopper.state import list_of, row_exists, rows_of
from flashlatte.runtime.gluon_compat import cta_barrier
from flashlatte.runtime.kernel_records import ElementPointer, Float32, Int32, Int64, Pointer

# PTX name of the kernel's first parameter.
_OUT_DESCRIPTOR = gl.constexpr("sparse_prefill_kernel_param_0")


class SparsePrefillOutput(NamedTuple):
    """The results, and the other inputs of the epilogue. ``sinks`` may be None.

    Attributes:
        descriptor: TMA descriptor of out; the first parameter of the kernel, by whose name PTX refers to it.
        damaged: int32 per tile, set to 1 if a row is NaN; None for tiles of one token.
    """

    descriptor: Pointer
    max_logits: ElementPointer
    lse: ElementPointer
    sinks: ElementPointer
    sink_stride: Int64
    heads: Int32
    softmax_scale: Float32
    empty_lse: Float32
    damaged: ElementPointer


@gluon.jit
def start_store_out(output, state, work, tile, staging, offset, SIDE: gl.constexpr, GROUP: gl.constexpr):
    """Write half of the output to ``staging`` [64, 256] at ``offset`` of shared memory, and start its TMA store.

    ``staging`` must not be written until ``tma.store_wait(0)`` returns.
    """
    head0 = (tile % work.head_blocks) * 64
    denominator = state.row_sum
    if output.sinks is not None:
        _, head = rows_of(tile, tile % work.head_blocks, gl.arange(0, 64, SCORE_ROWS), GROUP)
        sink = gl.load(output.sinks + head * output.sink_stride, mask=head < output.heads, other=float("-inf"))
        denominator += gl.exp2(sink * LOG2_E - state.row_max)
    inverse = gl.where(state.row_sum != 0, 1.0 / denominator, 0.0)
    out = state.out * gl.convert_layout(inverse, OUTPUT_ROWS, assert_trivial=True)[:, None]
    if GROUP > 1:
        # A row without NaN in its own selection may be NaN as well, because of a NaN that another token of the tile
        # selected.
        is_nan = gl.max(gl.where(out == out, 0, 1), 1)
        gl.store(output.damaged + tile + gl.zeros_like(is_nan), is_nan, mask=is_nan != 0)
    staging.store(out.to(staging.dtype))
    fence_async_shared()
    cta_barrier()
    store_evict_first(_OUT_DESCRIPTOR, offset, head0, list_of(work, tile) * GROUP, SIDE * 256)


@gluon.jit
def store_statistics(output, state, score_max, work, tile, GROUP: gl.constexpr):
    """``score_max`` [64]: maximum of the unscaled scores."""
    row = gl.arange(0, 64, SCORE_ROWS)
    token, head = rows_of(list_of(work, tile), tile % work.head_blocks, row, GROUP)
    row = token.to(gl.int64) * output.heads + head
    # Not "> 0": the statistics of a row with a NaN among its keys are NaN.
    seen = state.row_sum != 0
    max_logits = gl.where(seen, score_max * output.softmax_scale, float("-inf"))
    log_sum = (state.row_max + gl.log2(state.row_sum)) * LN_2
    lse = gl.where(seen, log_sum, output.empty_lse)
    inside = row_exists(work, token, head, output.heads, GROUP)
    gl.store(output.max_logits + row, max_logits, mask=inside)
    gl.store(output.lse + row, lse, mask=inside)
