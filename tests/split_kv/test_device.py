"""The tile scheduler: every block is in exactly one range, in order, and ranges have equal cost."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

import pytest
import torch
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from flashlatte.runtime.triton_kernel import kernel
from flashlatte.split_kv import device, ranges

pytestmark = pytest.mark.interpreter

BLOCK_N = 16
LENGTHS = st.lists(st.sampled_from([-5, 0, 1, 16, 17, 100, 500, 3000]), min_size=1, max_size=20)


@kernel
def splits_kernel(
    out, metadata, lengths, requests, tokens, limit, num_ranges, BLOCK_N: tl.constexpr, OVERHEAD: tl.constexpr
):
    """out [ranges, items, 2]: first and last block of each range's split of each item; metadata [ranges]."""
    num_items = requests * tokens
    key_lengths = device.KeyLengths(num_items, tokens, lengths, tokens, 1, limit)
    number = tl.program_id(0)
    cta_range = ranges.find_range(number, num_ranges, key_lengths, BLOCK_N, OVERHEAD)
    tl.store(metadata + number, ranges.continued_item(cta_range, OVERHEAD).to(tl.float32))
    cost = cta_range.first_cost
    for item in range(cta_range.first, cta_range.stop):
        blocks = device.item_blocks(item, key_lengths, BLOCK_N)
        begin, end = ranges.split_of(cta_range, cost, blocks, OVERHEAD)
        if begin < end:
            tl.store(out + (number * num_items + item) * 2, begin)
            tl.store(out + (number * num_items + item) * 2 + 1, end)
        cost += blocks + OVERHEAD


@kernel
def metadata_kernel(items_out, boundaries_out, metadata, items: tl.int32, num_ranges: tl.int32):
    """items_out [items, 2]: first range of each item, and its ranges. boundaries_out [ranges - 1, 3]: of the boundary
    before each range but the first, the item first split there, its first range and its ranges."""
    item = tl.program_id(0)
    if item < items:
        first, count = device.ranges_of_item(item, metadata, num_ranges)
        tl.store(items_out + item * 2, first)
        tl.store(items_out + item * 2 + 1, count)
    if item < num_ranges - 1:
        item, first, count = device.item_split_first_at(item + 1, metadata, num_ranges)
        row = boundaries_out + tl.program_id(0) * 3
        tl.store(row, item)
        tl.store(row + 1, first)
        tl.store(row + 2, count)


@kernel
def counts_kernel(out, lengths, extra_lengths, BLOCK_N: tl.constexpr):
    """out [2, 3, 2]: blocks of 3 requests of 2 tokens, with lengths per request and an extra list per token."""
    key_lengths = device.KeyLengths(6, 2, lengths, 1, 0, 100, extra_lengths, 2, 1, 40)
    items = tl.arange(0, 8)
    tl.store(out + items, device.item_blocks(items, key_lengths, BLOCK_N), mask=items < 6)


def schedule(lengths, tokens, num_ranges, overhead, limit=2000):
    """Blocks of each item, splits [ranges, items, 2] (-1 for empty splits), and the metadata."""
    lengths = torch.tensor(lengths, dtype=torch.int32).repeat_interleave(tokens)
    items = len(lengths)
    splits = torch.full((num_ranges, items, 2), -1, dtype=torch.int32)
    metadata = torch.full((num_ranges,), torch.nan)
    splits_kernel[(num_ranges,)](
        splits, metadata, lengths, items // tokens, tokens, limit, num_ranges, BLOCK_N, overhead
    )
    blocks = -(-lengths.clamp(0, limit) // BLOCK_N)
    return blocks.clamp_min(1).tolist(), splits.tolist(), metadata


def ranges_of(item, splits):
    return [number for number, of_items in enumerate(splits) if of_items[item][0] >= 0]


@given(LENGTHS, st.integers(1, 2), st.integers(1, 24), st.integers(0, 3))
def test_ranges_cover_every_block_once_in_order(lengths, tokens, num_ranges, overhead):
    blocks, splits, _ = schedule(lengths, tokens, num_ranges, overhead)
    for item, count in enumerate(blocks):
        numbers = ranges_of(item, splits)
        ends = [0] + [splits[number][item][1] for number in numbers]
        assert [splits[number][item][0] for number in numbers] == ends[:-1]
        assert ends[-1] == count
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def check_metadata(lengths, num_ranges, overhead):
    _, splits, metadata = schedule(lengths, 1, num_ranges, overhead)
    items = torch.full((len(lengths), 2), -1, dtype=torch.int32)
    boundaries = torch.full((num_ranges - 1, 3), -1, dtype=torch.int32)
    ctas = max(len(lengths), num_ranges - 1)
    metadata_kernel[(ctas,)](items, boundaries, metadata, len(lengths), num_ranges)
    found = [ranges_of(item, splits) for item in range(len(lengths))]
    split = [(item, numbers[0], len(numbers)) for item, numbers in enumerate(found) if len(numbers) > 1]
    assert [(item, *row) for item, row in enumerate(items.tolist()) if row[1] > 1] == split
    assert [tuple(row) for row in boundaries.tolist() if row[2] > 0] == split
    return split


@given(LENGTHS, st.integers(2, 24), st.integers(0, 3))
def test_metadata_list_split_items(lengths, num_ranges, overhead):
    check_metadata(lengths, num_ranges, overhead)


@pytest.mark.full
def test_split_items_beyond_one_scan_are_found():
    split = check_metadata([(i * 37) % 900 for i in range(device.SCAN.value + 50)], 24, 1)
    assert any(item >= device.SCAN.value for item, _, _ in split)


@pytest.mark.full
@given(LENGTHS, st.integers(1, 24), st.integers(0, 3))
def test_ranges_are_even_and_share_at_most_two_items(lengths, num_ranges, overhead):
    blocks, splits, _ = schedule(lengths, 1, num_ranges, overhead)
    total = sum(blocks) + overhead * len(blocks)
    in_use = min(num_ranges, max(total // (overhead + 1), 1))
    for number, items in enumerate(splits):
        taken = [end - begin for begin, end in items if begin >= 0]
        assert sum(taken) <= -(-total // in_use), number
        assert sum(begin > 0 for begin, _ in items) <= 1
        assert sum(begin == 0 and end < count for (begin, end), count in zip(items, blocks, strict=True)) <= 1


def test_uniform_lengths_with_one_range_each_are_not_split():
    _, splits, metadata = schedule([100] * 12, 1, 4, 2)
    assert metadata.tolist() == [-1] * 4
    assert [sum(begin >= 0 for begin, _ in of_items) for of_items in splits] == [3] * 4


@pytest.mark.full
def test_more_items_than_one_scan_holds():
    lengths = [(i * 37) % 90 for i in range(device.SCAN.value + 50)]
    blocks, splits, _ = schedule(lengths, 1, 3, 1)
    taken = [sum(of_items[item][1] - of_items[item][0] for of_items in splits) for item in range(len(lengths))]
    assert taken == blocks


def test_lengths_of_requests_and_of_tokens_and_two_lists():
    lengths = torch.tensor([0, 33, 1000], dtype=torch.int64)
    extra = torch.tensor([[0, 1], [16, 17], [-3, 50]], dtype=torch.int32)
    out = torch.empty(6, dtype=torch.int32)
    counts_kernel[(1,)](out, lengths, extra, BLOCK_N)
    # 0, 33 and 100 (the limit) keys in 16s, and 0 to 40 more.
    assert out.tolist() == [1, 1, 3 + 1, 3 + 2, 7 + 0, 7 + 3]
