"""The queries kernel: dq of 64 heads of a query token, and their P and dS for the keys kernel."""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.row_loads import LatentKeys
from flashlatte.kernels.triton.selections import TokenSelections, selected_count
from flashlatte.ops.sparse_attention.hopper.consumers import QueryGradientArgs, consume_scores, consume_values
from flashlatte.ops.sparse_attention.hopper.producer import produce
from flashlatte.ops.sparse_attention.hopper.state import HEADS, KEYS, SparseBackwardPiece, SparseBackwardRows
from flashlatte.ops.sparse_attention.hopper.tiles import allocate
from flashlatte.runtime.triton_kernel import gluon_kernel

# Registers per thread. The scores consumer gets the rest of 12 warps with 168 each: 232.
_VALUES_REGISTERS = gl.constexpr(232)
_PRODUCER_REGISTERS = gl.constexpr(40)


@gluon_kernel
def query_gradients_kernel(
    rows: SparseBackwardRows,
    keys: LatentKeys,
    selections: TokenSelections,
    piece: SparseBackwardPiece,
    dq,
    softmax_scale: gl.float32,
    HAS_ROPE: gl.constexpr,
):
    """A program processes a block of heads of a token of the piece."""
    token = piece.first_token + gl.program_id(0) // piece.head_blocks
    head = gl.program_id(0) % piece.head_blocks * HEADS
    count = selected_count(selections, token, selections.topk)
    # At least one step, which is fully masked without keys: every tile that the keys kernel may read must be written.
    steps = gl.maximum((count + KEYS - 1) // KEYS, 1)
    tiles = allocate(keys.start.dtype.element_ty, HAS_ROPE)
    args = QueryGradientArgs(tiles, rows, piece, dq, token, head, steps, softmax_scale)
    barriers.sync_before_warp_specialize()
    gl.warp_specialize(
        [
            (consume_scores, (args, HAS_ROPE)),
            (consume_values, (args, HAS_ROPE)),
            (produce, (rows, keys, selections, token, head, count, steps, tiles, HAS_ROPE)),
        ],
        [4, 4],
        [_VALUES_REGISTERS, _PRODUCER_REGISTERS],
    )
