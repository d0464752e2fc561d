"""The keys of a query by slots, and the rows of queries and keys. A slot is a position in the query's list of indices,
or the key itself if the query attends to a range."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.online_softmax import within
from flashlatte.runtime.kernel_records import Constant, Float32, Int32, Int64, Pointer


class SlotRanges(NamedTuple):
    """The slots of tokens, and the keys in them.

    Attributes:
        ranges: int32 [2, s_q]: the first slot of each token's keys, and the slot after the last one.
        indices: [s_q, 1, topk], or None: a slot is a key.
        width: number of slots of a token.
    """

    ranges: Pointer
    indices: Pointer
    indices_stride: Int64
    s_q: Int32
    s_kv: Int32
    width: Int32


class AttentionRows(NamedTuple):
    """q [s_q, h_q, d] and kv [s_kv, d] of the attention. Strides are in units of ``align`` elements."""

    q: Pointer
    stride_token: Int64
    stride_head: Int64
    kv: Pointer
    kv_stride: Int64
    h_q: Int32
    softmax_scale: Float32
    align: Constant


class IndexerRows(NamedTuple):
    """index_q [s_q, h_i, d_i], index_k [s_kv, d_i] and index_weights [s_q, h_i]. The strides of the first two are in
    units of ``align`` elements."""

    q: Pointer
    stride_token: Int64
    stride_head: Int64
    k: Pointer
    k_stride: Int64
    weights: Pointer
    weights_stride: Int64
    h_i: Int32
    index_scale: Float32
    use_relu: Constant
    align: Constant


@triton.jit
def query_offset(rows, token, head):
    """Offset of query heads from the first one, in elements. ``rows``: ``AttentionRows`` or ``IndexerRows``."""
    return (token * rows.stride_token + head * rows.stride_head) * rows.align


@triton.jit
def slot_range(slots, token):
    """(begin, end) of the slots of a token's keys."""
    return tl.load(slots.ranges + token), tl.load(slots.ranges + slots.s_q + token)


@triton.jit
def keys_at(slot, begin, end, slots, token):
    """(keys, whether the token attends to them) at ``slot``; key 0 for masked slots."""
    seen = (slot >= begin) & (slot < end)
    key = slot
    if slots.indices is not None:
        # Clamped to be in bounds for every slot: Triton does not pipeline a masked load here.
        row = slots.indices + token * slots.indices_stride
        key = tl.load(row + tl.minimum(slot, slots.width - 1))
        seen = seen & within(key, slots.s_kv)
    return tl.where(seen, key, 0).to(tl.int64), seen
