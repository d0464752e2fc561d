"""What Gluon kernels work out about ranges, as far as it is arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from flashlatte.split_kv.gluon import range_with


@given(st.integers(1, 500), st.integers(1, 2**20), st.data())
def test_a_cost_is_in_the_range_that_begins_before_it_and_ends_after(ranges, total, data):
    ranges = min(ranges, total)
    cost = data.draw(st.integers(0, total - 1))
    number = range_with.fn(cost, total, ranges)
    assert number * total // ranges <= cost < (number + 1) * total // ranges
    assert 0 <= number < ranges
