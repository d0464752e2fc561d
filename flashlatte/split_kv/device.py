"""The terms of split-KV: work items, their blocks, and the partial outputs of their splits.

A *work item* has its own list of keys: a request in dense decode, a query token of a request in sparse decode. Its keys
are divided into blocks of BLOCK_N; a work item without keys counts as one block, so that a CTA writes its empty result.
A *group* is the set of query rows of a work item that one CTA processes (some heads of one kv head); all groups of a
work item have the same blocks.

Balanced ranges (``ranges``). The keys of all work items are divided into ranges of equal cost, one for a CTA of each
group. The intersection of a work item with a range is a *split*.

Fixed splits. The splits of a work item depend only on its own length, so that results do not depend on the batch.

Partial outputs. A CTA that processes all of a work item writes its result. Otherwise it writes a partial output and its
lse to the scratch. The *split metadata* after them state what to combine: for each range, the work item that it
continues, or -1; with fixed splits, the number of splits of each work item. Metadata are float32 like the scratch; a
balanced schedule has fewer than 2^24 work items (``plan.num_ranges``), so their indices are exact.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.runtime.kernel_records import ElementPointer, Int32, Int64, OptionalInt32

# Lengths per step of a CTA's scan.
SCAN = tl.constexpr(256)


class KeyLengths(NamedTuple):
    """The number of keys of the work items. Item i is token i % tokens of request i // tokens (tokens = None in dense
    decode: one).

    Attributes:
        num_items: requests · tokens.
        tokens: work items of a request; None: 1.
        lengths: number of keys at [request · stride_request + token · stride_token], any integer; None: ``limit`` keys
            each.
        limit: maximum number of keys of a work item; lengths are clamped to 0 … limit. extra_lengths,
            extra_lengths_stride_request, extra_lengths_stride_token, extra_limit: the same for a second list, whose
            blocks follow those of the first; extra_limit is None without a second list.
    """

    num_items: Int32
    tokens: OptionalInt32
    lengths: ElementPointer
    lengths_stride_request: Int64
    lengths_stride_token: Int64
    limit: Int32
    extra_lengths: ElementPointer = None
    extra_lengths_stride_request: Int64 = 0
    extra_lengths_stride_token: Int64 = 0
    extra_limit: OptionalInt32 = None


def key_lengths(
    requests: int,
    tokens: int | None,
    lengths: torch.Tensor | None,
    limit: int,
    extra_lengths: torch.Tensor | None = None,
    extra_limit: int | None = None,
) -> KeyLengths:
    """Make ``KeyLengths`` from lengths [requests] or [requests, tokens]."""
    return KeyLengths(
        requests if tokens is None else requests * tokens,
        tokens,
        lengths,
        *_strides_of(lengths),
        limit,
        extra_lengths,
        *_strides_of(extra_lengths),
        extra_limit,
    )


def _strides_of(lengths: torch.Tensor | None) -> tuple[int, int]:
    """Strides over requests and tokens."""
    if lengths is None:
        return 0, 0
    return lengths.stride(0), lengths.stride(1) if lengths.dim() == 2 else 0


class SplitGrid(NamedTuple):
    """The numbering of a launch's CTAs (``SplitPlan.grid``).

    Attributes:
        num_groups: groups of a work item, ``groups_per_head`` of them per kv head.
        num_splits: number of balanced ranges, or maximum number of fixed splits of a work item.
        first_item: the first work item of the launch.
    """

    num_groups: Int32
    groups_per_head: Int32
    num_splits: Int32
    first_item: Int32


@triton.jit
def request_and_token(item, tokens):
    """The request of a work item, and its query token in the request. ``tokens``: work items of a request; None: 1."""
    if tokens is None:
        return item, item % 1
    else:
        return item // tokens, item % tokens


@triton.jit
def key_count(item, key_lengths):
    """Number of keys in the first list of a work item, or of a vector of work items (0 after the last one)."""
    return _clamped_length(
        item,
        key_lengths,
        key_lengths.lengths,
        key_lengths.lengths_stride_request,
        key_lengths.lengths_stride_token,
        key_lengths.limit,
    )


@triton.jit
def extra_key_count(item, key_lengths):
    """Number of keys in the second list of a work item."""
    return _clamped_length(
        item,
        key_lengths,
        key_lengths.extra_lengths,
        key_lengths.extra_lengths_stride_request,
        key_lengths.extra_lengths_stride_token,
        key_lengths.extra_limit,
    )


@triton.jit
def _clamped_length(item, key_lengths, lengths, stride_request, stride_token, limit):
    in_batch = item < key_lengths.num_items
    if lengths is None:
        return tl.where(in_batch, limit, 0).to(tl.int32)
    else:
        request, token = request_and_token(item, key_lengths.tokens)
        offset = request * stride_request + token * stride_token
        length = tl.load(lengths + offset, mask=in_batch, other=0).to(tl.int64)
        return tl.minimum(tl.maximum(length, 0), limit).to(tl.int32)


@triton.jit
def item_blocks(item, key_lengths, BLOCK_N: tl.constexpr):
    """Number of blocks of a work item, or of a vector of work items: at least 1."""
    blocks = tl.cdiv(key_count(item, key_lengths), BLOCK_N)
    if key_lengths.extra_limit is not None:
        blocks += tl.cdiv(extra_key_count(item, key_lengths), BLOCK_N)
    return tl.maximum(blocks, 1)


@triton.jit
def fixed_splits(blocks, SPLIT_BLOCKS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Blocks per split, and number of splits of a work item: SPLIT_BLOCKS per split, or more if there would be more
    than MAX_SPLITS."""
    size = tl.maximum(tl.cdiv(blocks, MAX_SPLITS), SPLIT_BLOCKS)
    return size, tl.cdiv(blocks, size)


@triton.jit
def partial_of_range(number, group, num_groups, continues_item):
    """Index of the partial output of a range: one for the item that it continues, one for an item that it begins."""
    return (number.to(tl.int64) * num_groups + group) * 2 + tl.where(continues_item, 0, 1)


@triton.jit
def partial_of_split(local_item, split, group, num_groups, max_splits):
    """Index of the partial output of a fixed split; ``local_item`` is relative to the first work item of the launch."""
    return (local_item.to(tl.int64) * num_groups + group) * max_splits + split


@triton.jit
def range_metadata(scratch, num_ranges, num_groups, PARTIAL: tl.constexpr):
    """Pointer to the split metadata of balanced ranges, after all partial outputs of PARTIAL elements."""
    return scratch + partial_of_range(num_ranges, 0, num_groups, True) * PARTIAL


@triton.jit
def item_metadata(scratch, num_items, num_groups, max_splits, PARTIAL: tl.constexpr):
    """Pointer to the split metadata of fixed splits; ``num_items``: work items of the launch."""
    return scratch + partial_of_split(num_items, 0, 0, num_groups, max_splits) * PARTIAL


@triton.jit
def ranges_of_item(item, metadata, num_ranges):
    """The first range of a split work item, and the number of its consecutive ranges."""
    first = num_ranges
    count = tl.zeros([], tl.int32)
    for start in range(0, num_ranges, SCAN):
        number = start + tl.arange(0, SCAN)
        continues = tl.load(metadata + number, mask=number < num_ranges, other=-1.0) == item
        count += tl.sum(continues.to(tl.int32))
        first = tl.minimum(first, tl.min(tl.where(continues, number, num_ranges)))
    return first - 1, count + 1


@triton.jit
def item_split_first_at(boundary, metadata, num_ranges):
    """The work item whose first split ends at the beginning of range ``boundary``: (item, first range, number of
    ranges).

    The number of ranges is 0 if no work item is split there, or one that is already split at an earlier boundary. Every
    split item has exactly one such boundary, and there are fewer boundaries than ranges, for any number of items.
    """
    item = tl.load(metadata + boundary).to(tl.int32)
    is_split = item >= 0
    first, count = ranges_of_item(item, metadata, tl.where(is_split, num_ranges, 0))
    return item, first, tl.where(is_split & (first + 1 == boundary), count, 0)
