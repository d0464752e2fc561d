"""The MLA layer with heads, and keys, divided over 2 to 4 processes, compared with the layer in one process."""

import pytest
import torch
from support import rank_layer_jobs


def assert_close(results, expected):
    for got, want in zip(results, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_heads_over_ranks(ranks):
    """8 heads over 3 ranks are 2, 3 and 3; every rank stores every token."""
    expected = rank_layer_jobs.whole()
    tokens = sum(sum(step.values()) for step in rank_layer_jobs.STEPS)
    for results, stored in ranks.run(rank_layer_jobs.divided, 1):
        assert_close(results, expected)
        assert stored == tokens


@pytest.mark.parametrize("index_format", [None, "index_fp32", pytest.param("index_fp8", marks=pytest.mark.full)])
def test_heads_and_keys_over_ranks(ranks, index_format):
    """Each token is stored once in each group that divides the keys: all 2, 3 or 4 ranks, or 2 of 4.

    Steps have prefill over cached tokens. An indexer selects among all of them, 8 for each query.
    """
    heads = 12
    expected = rank_layer_jobs.whole(heads, index_format)
    tokens = sum(sum(step.values()) for step in rank_layer_jobs.STEPS)
    for kv_ranks in {2: (2,), 3: (3,), 4: (2, 4)}[ranks.size]:
        results = ranks.run(rank_layer_jobs.divided, kv_ranks, heads, index_format)
        for got, _ in results:
            assert_close(got, expected)
        assert sum(stored for _, stored in results) == ranks.size // kv_ranks * tokens


def test_fewer_heads_than_ranks(ranks):
    failures = ranks.outcomes(rank_layer_jobs.divided, 1, 1)
    assert all("config must have at least as many heads as the" in failure.message for failure in failures)
