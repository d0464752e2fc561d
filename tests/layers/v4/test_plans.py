"""Which requests attend over a workspace, and the workspace's size limits."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte.layers.v4 import V4Step, WorkspaceLimits
from flashlatte.layers.v4.workspace import V4Prefill, paged_slices


@given(
    spans=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200)), max_size=6),
    ratio=st.sampled_from([0, 4, 128]),
    topk=st.sampled_from([None, 5]),
    window=st.sampled_from([1, 8, 128]),
    queries=st.sampled_from([1, 40]),
    max_rows_per_query=st.sampled_from([2, 100]),
    rows=st.sampled_from([100, 400, 10_000]),
    indices=st.sampled_from([1, 3_000, 10**6]),
)
def test_plans(spans, ratio, topk, window, queries, max_rows_per_query, rows, indices):
    spans = tuple((begin, begin + count) for begin, count in spans)
    limits = WorkspaceLimits(queries, max_rows_per_query, rows, indices)
    chunks = V4Prefill(spans, window, limits, torch.device("cpu")).plan(ratio, topk)
    starts = [0]
    for begin, end in spans:
        starts.append(starts[-1] + end - begin)

    # Requests and positions that attend over a workspace.
    expected = set()
    for request, (begin, end) in enumerate(spans):
        new = end - begin
        needed = (end // ratio if ratio else 0) + min(end, new + window - 1)
        if new >= queries and needed <= min(rows, max_rows_per_query * new):
            expected |= {(request, position) for position in range(begin, end)}
    found = []
    for chunk in chunks:
        requests, begins = torch.arange(len(spans))[chunk.requests].tolist(), chunk.cu_queries.tolist()
        first = chunk.tokens.start
        assert chunk.tokens.stop - first == begins[-1]
        assert len(requests) * chunk.rows <= rows
        width = 0
        for i, (request, length, gathered) in enumerate(
            zip(requests, chunk.seq_lens.tolist(), chunk.gather_lens.tolist(), strict=True)
        ):
            new = begins[i + 1] - begins[i]
            found += [(request, position) for position in range(length - new, length)]
            # The tokens are these positions', and their first window is there.
            assert first + begins[i] == starts[request] + length - new - spans[request][0]
            assert gathered == min(length, new + window - 1)
            groups = length // ratio if ratio else 0
            assert chunk.group_rows >= groups
            assert chunk.group_rows + gathered <= chunk.rows
            # Groups from the request's first row on, followed by the last tokens.
            assert [part[i].item() for part in chunk.groups] == [i * chunk.rows, 0, groups]
            assert [part[i].item() for part in chunk.window] == [
                i * chunk.rows + chunk.group_rows,
                length - gathered,
                length,
            ]
            width = max(width, window + (groups if topk is None else min(topk, groups)))
        assert width * begins[-1] <= indices or begins[-1] == 1
    assert len(found) == len(set(found))
    assert set(found) == expected
    # The others are in the parts between, and all are in order.
    parts = [(part.start, part.stop) for part in paged_slices(chunks, starts[-1])]
    everything = sorted(parts + [(chunk.tokens.start, chunk.tokens.stop) for chunk in chunks])
    assert sum(end - begin for begin, end in everything) == starts[-1]
    assert all(one[1] == other[0] for one, other in pairwise(everything))


def test_padding_is_not_gathered():
    first_tokens = torch.tensor([3, 0, 60])
    prefill = V4Prefill(
        ((0, 50), (10, 60), (0, 50)), 8, WorkspaceLimits(min_queries=10), torch.device("cpu"), first_tokens
    )
    (chunk,) = prefill.plan(4, None)
    assert chunk.gather_lens.tolist() == [47, 57, 0]
    assert chunk.window.starts.tolist() == [3, 3, 50]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 3)], "^spans must be of window_table's 2 requests, got 1$"),
        ([(0, 3), (4, 3)], r"^spans must be \(first, end\) with 0 <= first <= end, got \(4, 3\)$"),
        ([(0, 3), (-1, 3)], r"^spans must be \(first, end\) with 0 <= first <= end, got \(-1, 3\)$"),
    ],
)
def test_spans_that_do_not_fit(spans, message):
    with pytest.raises(ValueError, match=message):
        V4Step.from_spans(spans, torch.arange(4).view(2, 2), {}, page_size=4)


def test_limits_are_checked():
    with pytest.raises(ValueError, match=r"^max_rows must be at least 1, got 0$"):
        WorkspaceLimits(max_rows=0)
