"""Which keys a program works on, computed by the program itself from the lengths of the call.

An *item* is what has a key list of its own: a request in dense decode, a query token of a request in sparse decode.
Its keys come in blocks of BLOCK_N; an item without keys counts as one block, so that some program writes its empty
result. A *group* is the set of query rows of an item that one program handles (some heads of one kv head); all
groups of an item have the same blocks.

Balanced parts. Items lie one after the other on a line of cost, OVERHEAD blocks and then the item's blocks each. Of
the total T, part p of P takes the costs from ⌊p·T/P⌋ to ⌊(p+1)·T/P⌋. So a part shares at most its first item with
the parts before it and its last item with those after it, and which parts share an item follows from the item's
place on the line alone: nothing is written down between the scheduling and its use, and no lengths of an earlier
call can be left over.

Fixed splits. An item's splits depend on its own length alone, for results that do not depend on the batch.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Lengths that a program scans at a time.
SCAN = tl.constexpr(256)


class KeyLists(NamedTuple):
    """The key lists of all items. Item i is token i % tokens of request i // tokens (tokens = 1 in dense decode).

    Attributes:
        num_items: requests · tokens.
        tokens: items of a request.
        lengths: keys of each item at [request · stride_request + token · stride_token], any integer; None: limit
            keys each.
        limit: the most keys an item can have; lengths are clamped to 0 … limit.
        extra_lengths, extra_stride_request, extra_stride_token, extra_limit: the same of a second list, whose
            blocks follow those of the first. extra_limit is None where there is none.
    """

    num_items: Any
    tokens: Any
    lengths: Any
    stride_request: Any
    stride_token: Any
    limit: Any
    extra_lengths: Any
    extra_stride_request: Any
    extra_stride_token: Any
    extra_limit: Any


class Part(NamedTuple):
    """Costs begin to end, in items first to stop (exclusive); item first starts at cost ``first_cost``."""

    begin: Any
    end: Any
    first: Any
    stop: Any
    first_cost: Any


@triton.jit
def key_count(item, lists):
    """Keys in the first list of an item, or of a vector of items (0 beyond the last item)."""
    return _clamped_length(item, lists, lists.lengths, lists.stride_request, lists.stride_token, lists.limit)


@triton.jit
def extra_key_count(item, lists):
    """Keys in the second list of an item."""
    return _clamped_length(
        item, lists, lists.extra_lengths, lists.extra_stride_request, lists.extra_stride_token, lists.extra_limit
    )


@triton.jit
def _clamped_length(item, lists, lengths, stride_request, stride_token, limit):
    in_batch = item < lists.num_items
    if lengths is None:
        return tl.where(in_batch, limit, 0).to(tl.int32)
    else:
        offset = (item // lists.tokens) * stride_request + (item % lists.tokens) * stride_token
        length = tl.load(lengths + offset, mask=in_batch, other=0).to(tl.int64)
        return tl.minimum(tl.maximum(length, 0), limit).to(tl.int32)


@triton.jit
def item_blocks(item, lists, BLOCK_N: tl.constexpr):
    """Blocks of an item, or of a vector of items: at least 1."""
    blocks = tl.cdiv(key_count(item, lists), BLOCK_N)
    if lists.extra_limit is not None:
        blocks += tl.cdiv(extra_key_count(item, lists), BLOCK_N)
    return tl.maximum(blocks, 1)


@triton.jit
def _item_costs(items, lists, BLOCK_N: tl.constexpr, OVERHEAD: tl.constexpr):
    blocks = item_blocks(items, lists, BLOCK_N)
    return tl.where(items < lists.num_items, blocks + OVERHEAD, 0).to(tl.int64)


@triton.jit
def _parts_in_use(num_parts, total, OVERHEAD: tl.constexpr):
    """Parts that get work: as many as there are, and no more than leaves each a block and its overhead."""
    return tl.minimum(num_parts.to(tl.int64), tl.maximum(total // (OVERHEAD + 1), 1))


@triton.jit
def find_part(part, num_parts, lists, BLOCK_N: tl.constexpr, OVERHEAD: tl.constexpr):
    """The ``Part`` that is number ``part`` of ``num_parts``. One without work has first = stop."""
    total = tl.zeros([], tl.int64)
    for start in range(0, lists.num_items, SCAN):
        total += tl.sum(_item_costs(start + tl.arange(0, SCAN), lists, BLOCK_N, OVERHEAD))
    parts = _parts_in_use(num_parts, total, OVERHEAD)
    begin = tl.minimum(part * total // parts, total)
    end = tl.minimum((part + 1) * total // parts, total)

    scanned = tl.zeros([], tl.int64)
    first_cost = tl.zeros([], tl.int64)
    first = tl.zeros([], tl.int32)
    stop = tl.zeros([], tl.int32)
    for start in range(0, lists.num_items, SCAN):
        items = start + tl.arange(0, SCAN)
        costs = _item_costs(items, lists, BLOCK_N, OVERHEAD)
        item_end = scanned + tl.cumsum(costs)
        is_before = (items < lists.num_items) & (item_end <= begin)
        is_begun = (items < lists.num_items) & (item_end - costs < end)
        # Both counts in one sum: a reduction is what takes time here.
        counts = tl.sum(tl.where(is_before, 1, 0) + tl.where(is_begun, 0x10000, 0))
        first += counts & 0xFFFF
        stop += counts >> 16
        first_cost += tl.sum(tl.where(is_before, costs, 0))
        scanned += tl.sum(costs)
    return Part(begin, end, first, stop, first_cost)


@triton.jit
def share(part, item_cost, blocks, OVERHEAD: tl.constexpr):
    """Blocks begin to end (exclusive) of an item that starts at ``item_cost``, as the part takes them.

    May be empty, where the part ends within the item's overhead; then the part has nothing to do with the item.
    """
    item_begin = item_cost + OVERHEAD
    begin = tl.minimum(tl.maximum(part.begin - item_begin, 0), blocks)
    end = tl.minimum(tl.maximum(part.end - item_begin, 0), blocks)
    return begin.to(tl.int32), end.to(tl.int32)


@triton.jit
def parts_of_item(item, num_parts, lists, BLOCK_N: tl.constexpr, OVERHEAD: tl.constexpr):
    """The first part that works on an item, and how many consecutive parts do."""
    item_cost = tl.zeros([], tl.int64)
    total = tl.zeros([], tl.int64)
    for start in range(0, lists.num_items, SCAN):
        items = start + tl.arange(0, SCAN)
        costs = _item_costs(items, lists, BLOCK_N, OVERHEAD)
        total += tl.sum(costs)
        item_cost += tl.sum(tl.where(items < item, costs, 0))
    return _sharers(item, item_cost, _parts_in_use(num_parts, total, OVERHEAD), total, lists, BLOCK_N, OVERHEAD)


@triton.jit
def item_split_first_at(boundary, num_parts, lists, BLOCK_N: tl.constexpr, OVERHEAD: tl.constexpr):
    """The item whose first split is where part ``boundary`` begins: (item, its first part, its parts).

    Its parts are 0 if no item is split there, or one that was split before. Every split item has one such boundary,
    of which there are fewer than parts, however many items there are.
    """
    total = tl.zeros([], tl.int64)
    for start in range(0, lists.num_items, SCAN):
        total += tl.sum(_item_costs(start + tl.arange(0, SCAN), lists, BLOCK_N, OVERHEAD))
    parts = _parts_in_use(num_parts, total, OVERHEAD)
    cost = boundary * total // parts

    scanned = tl.zeros([], tl.int64)
    item_cost = tl.zeros([], tl.int64)
    item = tl.zeros([], tl.int32)
    for start in range(0, tl.where(boundary < parts, lists.num_items, 0), SCAN):
        items = start + tl.arange(0, SCAN)
        costs = _item_costs(items, lists, BLOCK_N, OVERHEAD)
        is_before = (items < lists.num_items) & (scanned + tl.cumsum(costs) <= cost)
        item += tl.sum(is_before.to(tl.int32))
        item_cost += tl.sum(tl.where(is_before, costs, 0))
        scanned += tl.sum(costs)
    first, count = _sharers(item, item_cost, parts, total, lists, BLOCK_N, OVERHEAD)
    return item, first, tl.where((boundary < parts) & (boundary == first + 1), count, 0)


@triton.jit
def _sharers(item, item_cost, parts, total, lists, BLOCK_N: tl.constexpr, OVERHEAD: tl.constexpr):
    begin = item_cost + OVERHEAD
    end = begin + item_blocks(item, lists, BLOCK_N)
    # The last p with ⌊p·T/P⌋ <= begin, and the first with ⌊(p+1)·T/P⌋ >= end.
    first = ((begin + 1) * parts - 1) // total
    last = (end * parts + total - 1) // total - 1
    return first.to(tl.int32), (last - first + 1).to(tl.int32)


@triton.jit
def part_record(part, group, num_groups, continues_item):
    """Scratch record of a part's partial result: it has one for an item begun before it, one for an item it begins."""
    return (part.to(tl.int64) * num_groups + group) * 2 + tl.where(continues_item, 0, 1)


@triton.jit
def continued_items(scratch, parts, num_groups, RECORD: tl.constexpr):
    """Where parts note the item that they continue, -1 if none, for who merges: behind the records, as float32.

    A balanced schedule has fewer than 2^24 items (``plan.balanced_parts``), so that their numbers are exact.
    """
    return scratch + part_record(parts, 0, num_groups, True) * RECORD


@triton.jit
def noted_parts_of_item(item, noted, num_parts):
    """``parts_of_item``, from what the parts noted at ``noted`` (see ``continued_items``)."""
    first = num_parts
    count = tl.zeros([], tl.int32)
    for start in range(0, num_parts, SCAN):
        number = start + tl.arange(0, SCAN)
        continues = tl.load(noted + number, mask=number < num_parts, other=-1.0) == item
        count += tl.sum(continues.to(tl.int32))
        first = tl.minimum(first, tl.min(tl.where(continues, number, num_parts)))
    return first - 1, count + 1


@triton.jit
def noted_item_split_first_at(boundary, noted, num_parts):
    """``item_split_first_at``, likewise."""
    item = tl.load(noted + boundary).to(tl.int32)
    is_split = item >= 0
    first, count = noted_parts_of_item(item, noted, tl.where(is_split, num_parts, 0))
    return item, first, tl.where(is_split & (first + 1 == boundary), count, 0)


@triton.jit
def fixed_splits(blocks, SPLIT_BLOCKS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Blocks of a split of an item, and the item's splits: of SPLIT_BLOCKS blocks, or longer if they were too many."""
    size = tl.maximum(tl.cdiv(blocks, MAX_SPLITS), SPLIT_BLOCKS)
    return size, tl.cdiv(blocks, size)


@triton.jit
def fixed_record(local_item, split, group, num_groups, splits_per_item):
    """Scratch record of a split, ``local_item`` counting from the first item of the launch."""
    return (local_item.to(tl.int64) * num_groups + group) * splits_per_item + split
