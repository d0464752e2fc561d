"""Decode with keys sharded over 1 to 4 gloo ranks, compared with float64 attention over all keys in one process."""

from __future__ import annotations

import re

import pytest
import torch
from support import rank_jobs, rank_prefill_jobs
from support.marks import mostly_full
from support.rank_jobs import Step, expected
from support.ranks import Failure, Ranks

from flashlatte import kv_cache

FORMS = ("direct", "all_to_all", "reduce_scatter", "all_reduce")
# With 3 ranks and interleave 1, 2, 8, 64: ranks without a key, with a partial page, with several pages, and no key at
# all.
LENGTHS = (0, 1, 2, 7, 40, 131)


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def joined(results, size, all_heads=False):
    """Results of all heads, concatenated from the ranks unless each has all heads."""
    if all_heads:
        for result in results[1:]:
            rank_jobs.same_bits(result, results[0])
        return results[0]
    assert len(results) == size
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=1)


@pytest.mark.parametrize("interleave", mostly_full((1, 8, 64), 8))
@pytest.mark.parametrize("form", FORMS)
def test_decode(ranks, form, interleave):
    for queries, seed in ((1, 0), (3, 1), (4, 2)):
        step = Step(LENGTHS, heads=2 * ranks.size, queries=queries, seed=seed)
        got = ranks.run(rank_jobs.decode, step, interleave=interleave, form=form, page_size=64)
        out, lse = joined(got, ranks.size)
        want_out, want_lse = expected(step)
        close(out, want_out)
        close(lse, want_lse)


def test_the_next_step_with_more_queries_waits_for_pending_reads(ranks):
    step = Step((5, 40, 9), heads=2 * ranks.size)
    other = Step(step.lengths, step.heads, queries=4, seed=1)
    out, lse = joined(ranks.run(rank_jobs.decode_before, step, other), ranks.size)
    want_out, want_lse = expected(step)
    close(out, want_out)
    close(lse, want_lse)


@pytest.mark.parametrize("form", FORMS)
def test_every_rank_may_have_all_heads(ranks, form):
    step = Step((0, 3, 50), heads=2 * ranks.size, queries=2)
    options = {"interleave": 2, "form": form, "all_heads": True, "causal": False, "sink": True}
    out, lse = joined(ranks.run(rank_jobs.decode, step, **options), ranks.size, all_heads=True)
    want_out, want_lse = expected(step, causal=False, sink=True)
    close(out, want_out)
    close(lse, want_lse)


def test_heads_that_the_ranks_do_not_divide(ranks):
    step = Step((9, 30), heads=ranks.size + 1)
    options = {"interleave": 1, "form": None, "all_heads": True}
    out, lse = joined(ranks.run(rank_jobs.decode, step, **options), ranks.size, all_heads=True)
    close(out, expected(step)[0])
    refused = ranks.outcomes(rank_jobs.decode, step, **options | {"form": "all_to_all"})
    assert all("q must have a multiple of" in failure.message for failure in refused)


def test_memory_that_cannot_be_reached_is_refused(ranks):
    refused = ranks.outcomes(rank_jobs.out_of_reach, Step((9, 30), heads=ranks.size))
    assert all(
        "form 'direct' is not possible: it needs GPUs, got tensors on cpu" in failure.message for failure in refused
    )


def test_sink_of_this_ranks_heads(ranks):
    step = Step((0, 12, 33), heads=ranks.size)
    got = ranks.run(rank_jobs.decode, step, interleave=1, form=None, sink=True)
    out, _ = joined(got, ranks.size)
    close(out, expected(step, sink=True)[0])


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_is_rounded_once(ranks, form):
    """Each rank's outputs are rounded to bf16 if they are sent as bf16, and the merged one once more."""
    step = Step((5, 200, 90), heads=ranks.size, queries=2, dtype=torch.bfloat16)
    out, lse = joined(ranks.run(rank_jobs.decode, step, interleave=1, form=form), ranks.size)
    want_out, want_lse = expected(step)
    assert out.dtype == torch.bfloat16
    # A bf16 ulp is at most 2^-8 of the value; partial outputs are at most as large as the largest value.
    largest = step.keys.double().abs().amax()
    assert (out.double() - want_out).abs().max() <= 2**-8 * largest
    close(lse, want_lse)


def test_format_with_scales(ranks):
    """Compared with one process over the same bytes, in which each query selects all keys up to its own."""
    step = Step((0, 5, 37), heads=ranks.size, queries=3, cache_format="v32")
    options = {"interleave": 1, "form": None, "page_size": 4}
    out, lse = joined(ranks.run(rank_jobs.decode, step, **options), ranks.size)
    want_out, want_lse = expected(rounded(step))
    close(out, want_out)
    close(lse, want_lse)


def rounded(step: Step) -> Step:
    """The step with keys rounded by its cache format."""
    same = Step(step.lengths, step.heads, step.queries, step.dtype, step.cache_format, step.seed)
    records = kv_cache.quantize(step.keys, step.cache_format or "bf16")
    same.__dict__["keys"] = kv_cache.dequantize(records, step.cache_format, dtype=torch.float32)
    return same


@pytest.mark.parametrize("interleave", [1, 8])
def test_sparse_decode_of_the_best_of_all_ranks(ranks, interleave):
    step, topk = Step((0, 1, 6, 50, 90), heads=ranks.size, queries=2), 20
    got = ranks.run(rank_jobs.sparse_decode, step, topk, interleave=interleave, form=None)
    chosen = got[0][0]
    assert all(choice.equal(chosen) for choice, _, _ in got)
    assert chosen.tolist() == best(step, topk)
    out, lse = joined([result[1:] for result in got], ranks.size)
    want_out, want_lse = expected(step, chosen=chosen)
    close(out, want_out)
    close(lse, want_lse)


@pytest.mark.parametrize("all_heads", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_queries_in_two_tensors(ranks, form, all_heads):
    """The jobs compare the results bitwise with those of joined queries."""
    step = Step((0, 3, 21), heads=2 * ranks.size, queries=2)
    options = {"interleave": 1, "form": form, "all_heads": all_heads, "rope": 8}
    out, _ = joined(ranks.run(rank_jobs.decode, step, **options), ranks.size, all_heads=all_heads)
    close(out, expected(step)[0])
    if form != "direct":
        ranks.run(rank_jobs.sparse_decode, step, 5, **options)


def test_queries_in_two_tensors_over_a_format_with_scales(ranks):
    step = Step((0, 5, 37), heads=ranks.size, queries=3, cache_format="v32")
    out, _ = joined(ranks.run(rank_jobs.decode, step, interleave=1, form=None, page_size=4, rope=64), ranks.size)
    close(out, expected(rounded(step))[0])


def test_queries_divided_differently_raise_before_a_collective(ranks):
    failures = ranks.outcomes(rank_jobs.decode_with_ropes, [8, *[4] * (ranks.size - 1)])
    said = "decode needs the same arguments on all ranks"
    assert all(said in failure.message for failure in failures)
    assert all("rank 0 has q (3, 1, 1, 16), q_rope (3, 1, 1, 8)" in failure.message for failure in failures)


def best(step: Step, topk: int) -> list[list[list[int]]]:
    """The k best visible keys of each query, NaN last, lower indices first among ties; in ascending order, then -1."""
    rows = []
    for length, logits in zip(step.lengths, rank_jobs.index_logits(step).tolist(), strict=True):
        rows.append([])
        for query in range(step.queries):
            visible = range(max(length - step.queries + query + 1, 0))
            value = {token: logits[query][token] for token in visible}
            order = sorted(visible, key=lambda token: (value[token] != value[token], -value[token], token))[:topk]
            rows[-1].append([*sorted(order), *[-1] * (topk - len(order))])
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_step(ranks, dtype):
    step = Step((), heads=ranks.size, dtype=dtype)
    out, lse = joined(ranks.run(rank_jobs.decode, step, interleave=1, form=None), ranks.size)
    assert out.shape == (0, 1, ranks.size, rank_jobs.VALUE)
    assert lse.shape == (0, ranks.size, 1)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_gradients_are_dropped_with_a_warning(ranks):
    for call in (rank_jobs.decode_with_gradient, rank_prefill_jobs.attend_with_gradient):
        for requires_grad, message in ranks.run(call):
            assert not requires_grad
            assert "has no backward: no gradient flows to its inputs" in message


def test_ranks_that_differ_raise(ranks):
    failures = ranks.outcomes(rank_jobs.call_with, {1: {"interleave": 2}}, interleave=1)
    assert all(isinstance(failure, Failure) for failure in failures[:2])
    assert failures[0].message.startswith("ValueError: ContextParallel needs the same arguments on all ranks: rank")
    assert all(re.search("ha(s|ve) interleave 1", failure.message) for failure in failures)
    assert all("rank 1 has interleave 2" in failure.message for failure in failures)
    # Every rank raises, and none is left waiting in a collective.
    assert all("needs the same arguments on all ranks" in failure.message for failure in failures)


@pytest.mark.parametrize("wrong", [{"interleave": 0}, {"form": "ring"}, {"form": ["ring"]}, {"all_heads": 2}], ids=str)
def test_a_wrong_argument_of_one_rank_raises_on_all(ranks, wrong):
    failures = ranks.outcomes(rank_jobs.call_with, {1: wrong})
    ((name, value),) = wrong.items()
    assert all(f"rank 1 has {name} {value}" in failure.message for failure in failures)
    # Creating engines again works.
    assert ranks.run(rank_jobs.call_with, {}) == [None] * ranks.size


def test_different_shapes_raise_before_a_collective(ranks):
    failures = ranks.outcomes(rank_jobs.decode_heads, [2, *[1] * (ranks.size - 1)])
    said = "decode needs the same arguments on all ranks: rank 0 has q (2, 1, 2, 24); rank"
    assert all(said in failure.message for failure in failures)
    assert all("q (2, 1, 1, 24)" in failure.message for failure in failures)
    assert all("needs the same arguments on all ranks" in failure.message for failure in failures)


def test_a_missing_rank_is_named(ranks):
    outcomes = ranks.outcomes(rank_jobs.only_rank_0_makes_one)
    assert "rank 1 did not reach ContextParallel" in outcomes[0].message
    assert outcomes[1:] == [None] * (ranks.size - 1)
    # Ranks that arrive later get its error.
    assert ranks.run(rank_jobs.the_others_make_one) == [None] * ranks.size


def test_a_failure_ends_all_ranks_with_its_reason():
    made = Ranks(3, timeout=2)
    try:
        messages = [failure.message for failure in made.outcomes(rank_jobs.fail_on, 1)]
    finally:
        made.close()
    assert messages[1] == "ValueError: cache of this rank is full"
    assert messages[0] == "RuntimeError: rank 1 failed, therefore rank 0 stops: ValueError: cache of this rank is full"
    assert messages[2] == "RuntimeError: rank 1 failed, therefore rank 2 stops: ValueError: cache of this rank is full"
