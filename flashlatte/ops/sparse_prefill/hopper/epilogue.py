"""A finished tile's way out: divide by the sum, and write out, max_logits and lse."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashlatte.kernels.hopper.mla_tiles import OUTPUT_ROWS, SCORE_ROWS
from flashlatte.kernels.hopper.ptx.memory import store_once
from flashlatte.runtime.gluon_compat import aggregate, cta_barrier

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
# PTX's name of the kernel's first argument.
_OUT_DESCRIPTOR = gl.constexpr("sparse_prefill_kernel_param_0")


@aggregate
class Output:
    """Where statistics go, and what results depend on besides the attention."""

    max_logits: gl.tensor
    lse: gl.tensor
    sinks: gl.tensor | gl.constexpr
    sink_stride: gl.tensor
    heads: gl.tensor
    softmax_scale: gl.tensor
    scale_log2: gl.tensor
    empty_lse: gl.tensor

    @gluon.constexpr_function
    def __init__(self, max_logits, lse, sinks, sink_stride, heads, softmax_scale, scale_log2, empty_lse):
        self.max_logits = max_logits
        self.lse = lse
        self.sinks = gl.constexpr(None) if sinks is None else sinks
        self.sink_stride = sink_stride
        self.heads = heads
        self.softmax_scale = softmax_scale
        self.scale_log2 = scale_log2
        self.empty_lse = empty_lse


@gluon.jit
def start_out(output, attention, problem, tile, staging, offset, SIDE: gl.constexpr):
    """Put a half of the output into ``staging`` [64, 256] at ``offset`` of shared memory, and have it stored.

    ``staging`` is the copy engine's until ``tma.store_wait(0)`` returns.
    """
    head0 = (tile % problem.head_blocks) * 64
    denominator = attention.row_sum
    if output.sinks is not None:
        head = head0 + gl.arange(0, 64, SCORE_ROWS)
        sink = gl.load(output.sinks + head * output.sink_stride, mask=head < output.heads, other=float("-inf"))
        denominator += gl.exp2(sink * LOG2E - attention.row_max * output.scale_log2)
    inverse = gl.where(attention.row_sum != 0, 1.0 / denominator, 0.0)
    out = attention.out * gl.convert_layout(inverse, OUTPUT_ROWS, assert_trivial=True)[:, None]
    staging.store(out.to(staging.dtype))
    fence_async_shared()
    cta_barrier()
    store_once(_OUT_DESCRIPTOR, offset, head0, problem.token(tile), SIDE * 256)


@gluon.jit
def store_statistics(output, attention, problem, tile):
    head = (tile % problem.head_blocks) * 64 + gl.arange(0, 64, SCORE_ROWS)
    row = problem.token(tile).to(gl.int64) * output.heads + head
    # Not "> 0": the statistics of a row with a NaN among its keys are NaN.
    seen = attention.row_sum != 0
    max_logits = gl.where(seen, attention.score_max * output.softmax_scale, float("-inf"))
    log_sum = attention.row_max * output.softmax_scale + gl.log2(attention.row_sum) * LN2
    lse = gl.where(seen, log_sum, output.empty_lse)
    inside = head < output.heads
    gl.store(output.max_logits + row, max_logits, mask=inside)
    gl.store(output.lse + row, lse, mask=inside)
