"""A finished tile's way out: divide by the sum, and write out, max_logits and lse."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.gluon_compat import aggregate
from flashlatte.ops.sparse_prefill.hopper.softmax import OUT_ROW, SCORE_ROW

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def _columns_layout(lane_columns, register_columns):
    """The accumulator's layout with other column bits in a thread's lane and registers."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], *([0, bit] for bit in register_columns), [8, 0], [0, 32], [0, 64], [0, 128]],
        lane_bases=[*([0, bit] for bit in lane_columns), [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 256],
    )


# Stores are 16 bytes wide if a thread has eight neighbouring columns; the accumulator has two. Each step exchanges
# one bit between the four threads of a row, which takes shuffles only: for both at once the compiler would go
# through shared memory, and there is none to spare.
_HALFWAY = gl.constexpr(_columns_layout([8, 4], [2, 16]))
_STORE = gl.constexpr(_columns_layout([8, 16], [2, 4]))


@aggregate
class Output:
    """Where results go, and what they depend on besides the attention."""

    out: gl.tensor
    token_stride: gl.tensor
    head_stride: gl.tensor
    stride_unit: gl.constexpr
    max_logits: gl.tensor
    lse: gl.tensor
    sinks: gl.tensor | gl.constexpr
    sink_stride: gl.tensor
    heads: gl.tensor
    softmax_scale: gl.tensor
    scale_log2: gl.tensor
    empty_lse: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        out,
        token_stride,
        head_stride,
        stride_unit,
        max_logits,
        lse,
        sinks,
        sink_stride,
        heads,
        softmax_scale,
        scale_log2,
        empty_lse,
    ):
        self.out = out
        self.token_stride = token_stride
        self.head_stride = head_stride
        self.stride_unit = gl.constexpr(stride_unit)
        self.max_logits = max_logits
        self.lse = lse
        self.sinks = gl.constexpr(None) if sinks is None else sinks
        self.sink_stride = sink_stride
        self.heads = heads
        self.softmax_scale = softmax_scale
        self.scale_log2 = scale_log2
        self.empty_lse = empty_lse


@gluon.jit
def store_out(output, attention, problem, tile, SIDE: gl.constexpr):
    denominator = attention.row_sum
    head0 = (tile % problem.head_blocks) * 64
    if output.sinks is not None:
        head = head0 + gl.arange(0, 64, SCORE_ROW)
        sink = gl.load(output.sinks + head * output.sink_stride, mask=head < output.heads, other=float("-inf"))
        denominator += gl.exp2(sink * LOG2E - attention.reference * output.scale_log2)
    inverse = gl.where(attention.row_sum != 0, 1.0 / denominator, 0.0)
    out = attention.out * gl.convert_layout(inverse, OUT_ROW, assert_trivial=True)[:, None]
    out = gl.convert_layout(gl.convert_layout(out.to(output.out.dtype.element_ty), _HALFWAY), _STORE)

    head = head0 + gl.arange(0, 64, gl.SliceLayout(1, _STORE))
    column = SIDE * 256 + gl.arange(0, 256, gl.SliceLayout(0, _STORE))
    start = problem.token(tile).to(gl.int64) * output.token_stride
    offset = (start + head.to(gl.int64) * output.head_stride) * output.stride_unit
    gl.store(output.out + offset[:, None] + column[None, :], out, mask=(head < output.heads)[:, None])


@gluon.jit
def store_statistics(output, attention, problem, tile):
    head = (tile % problem.head_blocks) * 64 + gl.arange(0, 64, SCORE_ROW)
    row = problem.token(tile).to(gl.int64) * output.heads + head
    # Not "> 0": the statistics of a row with a NaN among its keys are NaN.
    seen = attention.row_sum != 0
    max_logits = gl.where(seen, attention.row_max * output.softmax_scale, float("-inf"))
    log_sum = attention.reference * output.softmax_scale + gl.log2(attention.row_sum) * LN2
    lse = gl.where(seen, log_sum, output.empty_lse)
    inside = head < output.heads
    gl.store(output.max_logits + row, max_logits, mask=inside)
    gl.store(output.lse + row, lse, mask=inside)
