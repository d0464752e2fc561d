"""The guide's scheduler in Python splits as the kernels do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

pytest.importorskip("triton")

from split_kv.test_ranges import RANGES, SCAN, Pointer

from flashlatte.split_kv import device, ranges

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "how-flashmla-works.md"
STEP, OVERHEAD = 128, 2


def find_splits(lengths: list[int], num_ranges: int) -> list[list[tuple[int, int, int]]]:
    """The page's function of this name, from the snippet that defines it."""
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = (code for code in snippets if "def find_splits" in code)
    names: dict = {"STEP": STEP}
    exec(code, names)
    return names["find_splits"](lengths, num_ranges)


def splits_of_the_kernel(lengths: list[int], num_ranges: int) -> list[list[tuple[int, int, int]]]:
    pointer = torch.tensor(lengths, dtype=torch.int32).as_subclass(Pointer)
    items = device.KeyLengths(len(lengths), 1, pointer, 1, 0, max(lengths))
    uniform = ranges.uniform_ranges_of(num_ranges, len(lengths), OVERHEAD)
    splits = []
    for number in range(num_ranges):
        of_range = RANGES.find_range(number, num_ranges, items, STEP, OVERHEAD, 1, uniform, SCAN)
        cost, found = of_range.first_cost, []
        for item in range(of_range.first, of_range.stop):
            steps = max(-(-lengths[item] // STEP), 1)
            begin, end = RANGES.split_of(of_range, cost, torch.tensor(steps), OVERHEAD)
            if begin < end:
                found.append((item, int(begin), int(end)))
            cost = cost + steps + OVERHEAD
        splits.append(found)
    return splits


@given(st.lists(st.integers(1, 10_000), min_size=3, max_size=20), st.integers(2, 6))
@example([4096, 1024, 512, 8192, 256], 6)
def test_the_guides_splits_equal_the_kernels(lengths, num_ranges):
    steps = [-(-length // STEP) for length in lengths]
    # Kernels assume equal lengths if the first length is the average, and then split at request boundaries.
    assume(steps[0] * len(steps) != sum(steps))
    assert find_splits(lengths, num_ranges) == splits_of_the_kernel(lengths, num_ranges)
