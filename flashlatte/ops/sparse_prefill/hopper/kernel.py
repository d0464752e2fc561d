"""The kernel: allocate shared memory, and run the three partitions."""

from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper import barriers
from flashlatte.ops.sparse_prefill.hopper.consumers import SparsePrefillArgs, consume_even, consume_odd
from flashlatte.ops.sparse_prefill.hopper.epilogue import SparsePrefillOutput
from flashlatte.ops.sparse_prefill.hopper.producer import SparsePrefillQueries, produce
from flashlatte.ops.sparse_prefill.hopper.state import SparsePrefillWork, allocate
from flashlatte.runtime.triton_kernel import gluon_kernel

# Registers per thread. The even consumer gets the rest of 12 warps with 168 each: 232.
_ODD_REGISTERS = gl.constexpr(232)
_PRODUCER_REGISTERS = gl.constexpr(40)


@gluon_kernel(by_element=("indices", "lengths", "sinks", "max_logits", "lse", "damaged"))
def sparse_prefill_kernel(
    out_desc,  # the first parameter, as ``epilogue`` requires
    q,
    q_token_stride: gl.int64,  # in units of 16 bytes, like q_head_stride and kv_stride
    q_head_stride: gl.int64,
    kv,
    kv_stride: gl.int64,
    indices,
    index_stride: gl.int64,
    lengths,
    length_stride: gl.int64,
    sinks,
    sink_stride: gl.int64,
    max_logits,
    lse,
    damaged,
    s_kv: gl.int32,
    heads: gl.int32,
    head_blocks: gl.int32,
    topk: gl.int32,
    tiles: gl.int32,
    tokens: gl.int32,
    softmax_scale: gl.float32,
    scale_log2: gl.float32,
    empty_lse: gl.float32,
    HEAD_DIM: gl.constexpr,
    GROUP: gl.constexpr,
):
    """GROUP: query tokens of a tile, 1, 2 or 4."""
    shared_tiles, shared = allocate(kv.dtype.element_ty, HEAD_DIM)
    work = SparsePrefillWork(indices, index_stride, lengths, length_stride, s_kv, topk, head_blocks, tiles, tokens)
    queries = SparsePrefillQueries(q, q_token_stride, q_head_stride, heads)
    output = SparsePrefillOutput(max_logits, lse, sinks, sink_stride, heads, softmax_scale, empty_lse, damaged)
    args = SparsePrefillArgs(shared_tiles, shared, scale_log2, None, work, output)
    barriers.sync_before_warp_specialize()
    gl.warp_specialize(
        [
            (consume_even, (args, HEAD_DIM, GROUP)),
            (consume_odd, (args, HEAD_DIM, GROUP)),
            (produce, (queries, kv, kv_stride, work, shared_tiles, shared, HEAD_DIM, GROUP)),
        ],
        [4, 4],
        [_ODD_REGISTERS, _PRODUCER_REGISTERS],
    )
