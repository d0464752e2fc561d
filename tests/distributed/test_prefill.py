"""Causal attention of one prompt over 2 to 4 processes, compared with float64 attention in one process."""

import re

import pytest
import torch
from support import rank_prefill_jobs

from flashlatte.distributed.prefill import zigzag_blocks


def expected(tokens, dtype):
    q, rows, weight = (x.double() for x in rank_prefill_jobs.draw(tokens, dtype))
    keys, values = rank_prefill_jobs.expand(rows, weight)
    scores = torch.einsum("qhd,khd->qhk", q, keys) * rank_prefill_jobs.SCALE
    position = torch.arange(tokens)
    scores = scores.masked_fill((position > position[:, None]).unsqueeze(1), -torch.inf)
    return torch.einsum("qhk,khv->qhv", scores.softmax(-1), values), scores.logsumexp(-1)


def joined(results, name):
    """All tokens in order, concatenated from the ranks; each is on exactly one rank."""
    positions = torch.cat([result["positions"] for result in results])
    order = positions.argsort()
    assert positions[order].equal(torch.arange(len(positions)))
    return torch.cat([result[name] for result in results])[order]


@pytest.mark.parametrize("tokens", [1, 3, 8, 67, 130])
def test_one_prompt(ranks, tokens):
    """Also prompts with fewer tokens than blocks, so that ranks have no tokens or only one block."""
    results = ranks.run(rank_prefill_jobs.attend, tokens)
    out, lse = expected(tokens, torch.float32)
    torch.testing.assert_close(joined(results, "out").double(), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(joined(results, "lse").double(), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_every_rank_has_the_same_work(size):
    """Number of (query, visible key) pairs in each round."""
    shards = [[*low, *high] for low, high in (zigzag_blocks(24 * size, rank, size) for rank in range(size))]
    for step in range(size):
        keys_of = [shards[(rank - step) % size] for rank in range(size)]
        work = {sum(key <= query for query in mine for key in keys) for mine, keys in zip(shards, keys_of, strict=True)}
        assert len(work) == 1


def test_repeats_are_the_same_bits(ranks):
    first, second = (ranks.run(rank_prefill_jobs.attend, 67, torch.bfloat16) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one["out"].equal(other["out"])
        assert one["lse"].equal(other["lse"])
    out, _ = expected(67, torch.bfloat16)
    # Keys and values are rounded to bf16 when expanded; partial outputs and the result are rounded once each.
    assert (joined(first, "out").double() - out).abs().max() <= 2**-6 * out.abs().max()


def test_scales_that_differ_raise(ranks):
    for failure in ranks.outcomes(rank_prefill_jobs.attend_with_another_scale):
        assert re.search(
            "attend needs the same arguments on all ranks: rank . has softmax_scale .\\.5; rank", failure.message
        )
