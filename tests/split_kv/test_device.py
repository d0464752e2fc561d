"""The schedule that programs compute for themselves: every block in one part, in order, and the parts even."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from flashlatte.runtime.triton_kernel import kernel
from flashlatte.split_kv import device

pytestmark = pytest.mark.interpreter

BLOCK_N = 16
LENGTHS = st.lists(st.sampled_from([-5, 0, 1, 16, 17, 100, 500, 3000]), min_size=1, max_size=20)


@kernel
def shares_kernel(out, lengths, requests, tokens, limit, num_parts, BLOCK_N: tl.constexpr, OVERHEAD: tl.constexpr):
    """out [parts, items, 2]: first and last block of each part's share of each item."""
    num_items = requests * tokens
    lists = device.KeyLists(num_items, tokens, lengths, tokens, 1, limit, None, 0, 0, None)
    number = tl.program_id(0)
    part = device.find_part(number, num_parts, lists, BLOCK_N, OVERHEAD)
    cost = part.first_cost
    for item in range(part.first, part.stop):
        blocks = device.item_blocks(item, lists, BLOCK_N)
        begin, end = device.share(part, cost, blocks, OVERHEAD)
        if begin < end:
            tl.store(out + (number * num_items + item) * 2, begin)
            tl.store(out + (number * num_items + item) * 2 + 1, end)
        cost += blocks + OVERHEAD


@kernel
def sharers_kernel(out, lengths, requests, tokens, limit, num_parts, BLOCK_N: tl.constexpr, OVERHEAD: tl.constexpr):
    """out [items, 2]: the first part of each item, and how many parts it has."""
    lists = device.KeyLists(requests * tokens, tokens, lengths, tokens, 1, limit, None, 0, 0, None)
    item = tl.program_id(0)
    first, count = device.parts_of_item(item, num_parts, lists, BLOCK_N, OVERHEAD)
    tl.store(out + item * 2, first)
    tl.store(out + item * 2 + 1, count)


@kernel
def boundaries_kernel(out, lengths, requests, tokens, limit, num_parts, BLOCK_N: tl.constexpr, OVERHEAD: tl.constexpr):
    """out [parts - 1, 3]: of the boundary before each part but the first, the item first split there, and its parts."""
    lists = device.KeyLists(requests * tokens, tokens, lengths, tokens, 1, limit, None, 0, 0, None)
    boundary = tl.program_id(0) + 1
    item, first, count = device.item_split_first_at(boundary, num_parts, lists, BLOCK_N, OVERHEAD)
    tl.store(out + tl.program_id(0) * 3, item)
    tl.store(out + tl.program_id(0) * 3 + 1, first)
    tl.store(out + tl.program_id(0) * 3 + 2, count)


@kernel
def noted_kernel(items_out, boundaries_out, noted, items: tl.int32, num_parts: tl.int32):
    """What ``sharers_kernel`` and ``boundaries_kernel`` write, from what the parts noted."""
    item = tl.program_id(0)
    if item < items:
        first, count = device.noted_parts_of_item(item, noted, num_parts)
        tl.store(items_out + item * 2, first)
        tl.store(items_out + item * 2 + 1, count)
    if item < num_parts - 1:
        item, first, count = device.noted_item_split_first_at(item + 1, noted, num_parts)
        row = boundaries_out + tl.program_id(0) * 3
        tl.store(row, item)
        tl.store(row + 1, first)
        tl.store(row + 2, count)


@kernel
def counts_kernel(out, lengths, extra_lengths, BLOCK_N: tl.constexpr):
    """out [2, 3, 2]: blocks of 3 requests of 2 tokens, with lengths per request and an extra list per token."""
    lists = device.KeyLists(6, 2, lengths, 1, 0, 100, extra_lengths, 2, 1, 40)
    items = tl.arange(0, 8)
    tl.store(out + items, device.item_blocks(items, lists, BLOCK_N), mask=items < 6)


def schedule(lengths, tokens, num_parts, overhead, limit=2000):
    lengths = torch.tensor(lengths, dtype=torch.int32).repeat_interleave(tokens)
    items = len(lengths)
    shares = torch.full((num_parts, items, 2), -1, dtype=torch.int32)
    sharers = torch.full((items, 2), -1, dtype=torch.int32)
    where = (lengths, items // tokens, tokens, limit, num_parts, BLOCK_N, overhead)
    shares_kernel[(num_parts,)](shares, *where)
    sharers_kernel[(items,)](sharers, *where)
    blocks = -(-lengths.clamp(0, limit) // BLOCK_N)
    return blocks.clamp_min(1).tolist(), shares.tolist(), sharers.tolist()


@settings(max_examples=8)
@given(LENGTHS, st.integers(1, 2), st.integers(1, 24), st.integers(0, 3))
def test_parts_cover_every_block_once_in_order(lengths, tokens, num_parts, overhead):
    blocks, shares, sharers = schedule(lengths, tokens, num_parts, overhead)
    for item, count in enumerate(blocks):
        parts = [part for part in range(num_parts) if shares[part][item][0] >= 0]
        ends = [0] + [shares[part][item][1] for part in parts]
        assert [shares[part][item][0] for part in parts] == ends[:-1]
        assert ends[-1] == count
        assert sharers[item] == [parts[0], len(parts)]
        assert parts == list(range(parts[0], parts[0] + len(parts)))


@settings(max_examples=8)
@given(LENGTHS, st.integers(1, 2), st.integers(2, 24), st.integers(0, 3))
def test_every_split_item_is_found_at_one_boundary(lengths, tokens, num_parts, overhead):
    assert split_at_boundaries(lengths, tokens, num_parts, overhead) == split_by_item(
        lengths, tokens, num_parts, overhead
    )


def test_split_items_beyond_one_scan_are_found():
    lengths = [(i * 37) % 900 for i in range(device.SCAN.value + 50)]
    found = split_at_boundaries(lengths, 1, 24, 1)
    assert found == split_by_item(lengths, 1, 24, 1)
    assert any(item >= device.SCAN.value for item, _, _ in found)


def split_at_boundaries(lengths, tokens, num_parts, overhead, limit=2000):
    """(item, first part, parts) of all split items, as the boundaries between parts have them."""
    lengths = torch.tensor(lengths, dtype=torch.int32).repeat_interleave(tokens)
    out = torch.full((num_parts - 1, 3), -1, dtype=torch.int32)
    where = (lengths, len(lengths) // tokens, tokens, limit, num_parts, BLOCK_N, overhead)
    boundaries_kernel[(num_parts - 1,)](out, *where)
    return [tuple(row) for row in out.tolist() if row[2] > 0]


@settings(max_examples=8)
@given(LENGTHS, st.integers(2, 24), st.integers(0, 3))
def test_what_parts_note_tells_which_items_are_split(lengths, num_parts, overhead):
    _, shares, sharers = schedule(lengths, 1, num_parts, overhead)
    noted = [-1.0] * num_parts
    for part, of_items in enumerate(shares):
        noted[part] = next((float(item) for item, (begin, _) in enumerate(of_items) if begin > 0), -1.0)
    items = torch.full((len(lengths), 2), -1, dtype=torch.int32)
    boundaries = torch.full((num_parts - 1, 3), -1, dtype=torch.int32)
    programs = max(len(lengths), num_parts - 1)
    noted_kernel[(programs,)](items, boundaries, torch.tensor(noted), len(lengths), num_parts)
    split = [(item, *sharer) for item, sharer in enumerate(sharers) if sharer[1] > 1]
    assert [(item, *found) for item, found in enumerate(items.tolist()) if found[1] > 1] == split
    assert [tuple(row) for row in boundaries.tolist() if row[2] > 0] == split


def split_by_item(lengths, tokens, num_parts, overhead):
    """The same, as the items have them."""
    _, _, sharers = schedule(lengths, tokens, num_parts, overhead)
    return [(item, first, count) for item, (first, count) in enumerate(sharers) if count > 1]


@settings(max_examples=8)
@given(LENGTHS, st.integers(1, 24), st.integers(0, 3))
def test_parts_are_even_and_share_at_most_two_items(lengths, num_parts, overhead):
    blocks, shares, _ = schedule(lengths, 1, num_parts, overhead)
    total = sum(blocks) + overhead * len(blocks)
    in_use = min(num_parts, max(total // (overhead + 1), 1))
    for part, items in enumerate(shares):
        taken = [end - begin for begin, end in items if begin >= 0]
        assert sum(taken) <= -(-total // in_use), part
        assert sum(begin > 0 for begin, _ in items) <= 1
        assert sum(begin == 0 and end < count for (begin, end), count in zip(items, blocks, strict=True)) <= 1


def test_one_length_and_as_many_parts_splits_nothing():
    blocks, shares, sharers = schedule([100] * 12, 1, 4, 2)
    assert [count for _, count in sharers] == [1] * 12
    assert [sum(begin >= 0 for begin, _ in part) for part in shares] == [3] * 4


def test_more_items_than_one_scan_holds():
    lengths = [(i * 37) % 90 for i in range(device.SCAN.value + 50)]
    out = torch.full((3, len(lengths), 2), -1, dtype=torch.int32)
    shares_kernel[(3,)](out, torch.tensor(lengths), len(lengths), 1, 2000, 3, BLOCK_N, 1)
    taken = (out[..., 1] - out[..., 0]).sum(dim=0)
    assert taken.tolist() == [max(-(-length // BLOCK_N), 1) for length in lengths]


def test_lengths_of_requests_and_of_tokens_and_two_lists():
    lengths = torch.tensor([0, 33, 1000], dtype=torch.int64)
    extra = torch.tensor([[0, 1], [16, 17], [-3, 50]], dtype=torch.int32)
    out = torch.empty(6, dtype=torch.int32)
    counts_kernel[(1,)](out, lengths, extra, BLOCK_N)
    # 0, 33 and 100 (the limit) keys in 16s, and 0 to 40 more.
    assert out.tolist() == [1, 1, 3 + 1, 3 + 2, 7 + 0, 7 + 3]
