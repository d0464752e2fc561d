"""``ranges``: its functions, run in Python with PyTorch's integers."""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("triton")

from flashlatte.split_kv import device, ranges

BLOCK_N = 16
# Work items per step of the scan.
ITEMS = 32
# Maximum keys of a request.
LIMIT = 2000


class Arithmetic:
    """The subset of ``tl`` that the functions use, with integers of the kernel's width."""

    int32 = torch.int32
    int64 = torch.int64
    # PyTorch has no division of ``uint32``.
    uint32 = torch.int64

    @staticmethod
    def static_assert(condition: bool, message: str) -> None:
        assert condition, message

    @staticmethod
    def to_tensor(value: Any) -> torch.Tensor:
        return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.int32)

    @staticmethod
    def cast(value: Any, dtype: torch.dtype) -> torch.Tensor:
        return Arithmetic.to_tensor(value).to(dtype)

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> torch.Tensor:
        return torch.where(torch.as_tensor(condition), Arithmetic.to_tensor(a), Arithmetic.to_tensor(b))

    @staticmethod
    def minimum(a: Any, b: Any) -> torch.Tensor:
        return torch.minimum(Arithmetic.to_tensor(a), Arithmetic.to_tensor(b))

    @staticmethod
    def maximum(a: Any, b: Any) -> torch.Tensor:
        return torch.maximum(Arithmetic.to_tensor(a), Arithmetic.to_tensor(b))

    @staticmethod
    def cdiv(a: Any, b: int) -> Any:
        return (a + b - 1) // b

    @staticmethod
    def sum(values: torch.Tensor, axis: int) -> torch.Tensor:
        return values.sum(axis, dtype=values.dtype)

    @staticmethod
    def cumsum(values: torch.Tensor, axis: int) -> torch.Tensor:
        return values.cumsum(axis, dtype=values.dtype)

    @staticmethod
    def load(items: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor, other: int) -> torch.Tensor:
        values, offsets = items
        return torch.where(mask, values[torch.where(mask, offsets, 0)], other)


class Pointer(torch.Tensor):
    """A pointer to a tensor."""

    def __add__(self, offsets: Any) -> Any:
        return self.as_subclass(torch.Tensor), torch.as_tensor(offsets)


def in_python(module: types.ModuleType, **others: Any) -> Any:
    """The module's device functions as Python functions, with the names ``others`` replaced."""
    scope = dict(vars(module))
    for name, value in vars(module).items():
        if hasattr(value, "fn"):
            scope[name] = types.FunctionType(value.fn.__code__, scope, name, value.fn.__defaults__)
    scope.update(others)
    return types.SimpleNamespace(**scope)


DEVICE = in_python(device, tl=Arithmetic)
RANGES = in_python(ranges, tl=Arithmetic, item_blocks=DEVICE.item_blocks)
# The work items that a scan reads at a time.
SCAN = torch.arange(ITEMS, dtype=torch.int32)


class Split(NamedTuple):
    """The split of a work item: blocks begin to end (exclusive), in whole granules."""

    range: int
    begin: int
    end: int


def key_lengths(lengths: list[int]) -> device.KeyLengths:
    pointer = torch.tensor(lengths, dtype=torch.int32).as_subclass(Pointer)
    return device.KeyLengths(len(lengths), 1, pointer, 1, 0, LIMIT)


def ranges_and_splits(
    lengths: list[int], num_ranges: int, overhead: int, granularity: int = 1, keep_items_whole: int | None = None
) -> tuple[list[Any], list[list[Split]]]:
    """All ranges, and the splits of each item."""
    items = key_lengths(lengths)
    uniform = keep_items_whole and ranges.uniform_ranges_of(keep_items_whole, len(lengths), overhead)
    found = [
        RANGES.find_range(n, num_ranges, items, BLOCK_N, overhead, granularity, uniform, SCAN)
        for n in range(num_ranges)
    ]
    splits: list[list[Split]] = [[] for _ in lengths]
    for number, cta_range in enumerate(found):
        cost = cta_range.first_cost
        for item in range(cta_range.first, cta_range.stop):
            blocks = blocks_of(lengths[item], granularity)
            begin, end = RANGES.split_of(cta_range, cost, torch.tensor(blocks), overhead)
            if begin < end:
                splits[item].append(Split(number, int(begin), int(end)))
            cost = cost + blocks + overhead
    return found, splits


def blocks_of(length: int, granularity: int = 1) -> int:
    """Blocks of a work item, in whole granules."""
    blocks = max(-(-min(max(length, 0), LIMIT) // BLOCK_N), 1)
    return -(-blocks // granularity) * granularity


@st.composite
def lengths_of_items(draw: st.DrawFn) -> list[int]:
    """Arbitrary lengths; often uniform, or with a first length equal to the average."""
    kind = draw(st.sampled_from(["any", "equal", "average"]))
    length = st.sampled_from([-5, 0, 1, 16, 17, 100, 500, 1999, 3000])
    if kind == "any":
        return draw(st.lists(length, min_size=1, max_size=2 * ITEMS + 9))
    average = draw(length)
    if kind == "equal":
        return [average] * draw(st.integers(1, 2 * ITEMS + 9))
    others = draw(st.lists(st.integers(0, 20), min_size=1, max_size=ITEMS))
    return [640, *(640 + BLOCK_N * n for n in others), *(640 - BLOCK_N * n for n in others)]


def check_splits(lengths: list[int], splits: list[list[Split]], granularity: int = 1) -> None:
    """Every block is in exactly one range, in order."""
    for length, of_item in zip(lengths, splits, strict=True):
        first = of_item[0].range
        assert [split.begin for split in of_item] == [0, *(split.end for split in of_item[:-1])]
        assert of_item[-1].end == blocks_of(length, granularity)
        assert [split.range for split in of_item] == list(range(first, first + len(of_item)))


@given(lengths_of_items(), st.integers(1, 40), st.integers(0, 3), st.sampled_from([1, 2, 4]))
def test_ranges_cover_every_block_once_in_order(lengths, num_ranges, overhead, granularity):
    found, splits = ranges_and_splits(lengths, num_ranges, overhead * granularity, granularity)
    check_splits(lengths, splits, granularity)
    has_work = [bool(cta_range.begin < cta_range.end) for cta_range in found]
    assert has_work == sorted(has_work)
    granules = sum(blocks_of(length, granularity) // granularity + overhead for length in lengths)
    in_use = sum(has_work)
    assert in_use == min(num_ranges, max(granules // (overhead + 1), 1))
    assert all(cta_range.end - cta_range.begin <= -(-granules // in_use) * granularity for cta_range in found)


@given(lengths_of_items(), st.integers(1, 40), st.integers(0, 3), st.integers(0, 39))
@example([500] * 40, 41, 2, 1)
@example([500] * 3, 6, 2, 0)
@example([500] * 3, 9, 2, 1)
def test_uniform_lengths_use_uniform_ranges(lengths, num_ranges, overhead, fewer):
    keep_items_whole = max(num_ranges - fewer, 1)
    found, splits = ranges_and_splits(lengths, num_ranges, overhead, keep_items_whole=keep_items_whole)
    check_splits(lengths, splits)
    if len(set(lengths)) == 1:
        blocks = blocks_of(lengths[0])
        if keep_items_whole % len(lengths) == 0:
            each = [split.end - split.begin for of_item in splits for split in of_item]
            assert len(each) == min(keep_items_whole, len(lengths) * blocks)
            assert max(each) - min(each) <= 1
        else:
            costs = len(lengths) * (blocks + overhead)
            in_use = sum(bool(cta_range.begin < cta_range.end) for cta_range in found)
            assert in_use == min(keep_items_whole, costs)
            assert all(cta_range.end - cta_range.begin <= -(-costs // in_use) for cta_range in found)


@given(lengths_of_items(), st.integers(1, 40), st.integers(0, 3))
@example([1, 17], 9, 1)
def test_ranges_with_item_agree_with_find_range(lengths, num_ranges, overhead):
    _, splits = ranges_and_splits(lengths, num_ranges, overhead, keep_items_whole=num_ranges)
    items = key_lengths(lengths)
    uniform = ranges.uniform_ranges_of(num_ranges, len(lengths), overhead)
    for item, of_item in enumerate(splits):
        first, count = RANGES.ranges_with_item(
            torch.tensor(item, dtype=torch.int32), uniform, SCAN, items, BLOCK_N, overhead
        )
        assert (int(first), int(count)) == (of_item[0].range, len(of_item))


@given(st.integers(1, 500), st.integers(1, 2**20), st.data())
def test_range_containing(ranges, total, data):
    ranges = min(ranges, total)
    cost = data.draw(st.integers(0, total - 1))
    number = RANGES.range_containing(cost, total, ranges)
    assert number * total // ranges <= cost < (number + 1) * total // ranges
    assert 0 <= number < ranges
