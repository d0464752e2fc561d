"""Times of kernels from a profile."""

from __future__ import annotations

import pytest

from flashlatte.bench.timing import times_of_spans


def test_waits_of_dependent_launches_count_once():
    spans = [(10.0, 30.0, "attention"), (12.0, 34.0, "combine"), (40.0, 45.0, "attention"), (41.0, 43.0, "inner")]
    assert times_of_spans(spans) == pytest.approx({"attention": 25.0, "combine": 4.0})
    assert times_of_spans([]) == {}
