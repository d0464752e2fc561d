"""Decode with keys sharded over several GPUs, compared with float64 attention over all keys."""

from __future__ import annotations

import pytest
import torch
from support import rank_jobs
from support.rank_jobs import Step, expected, own_heads

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("group")]

FORMS = ("direct", "all_to_all", "reduce_scatter", "all_reduce")
LENGTHS = (0, 1, 2, 63, 700, 3001)


def assert_close(step: Step, out: torch.Tensor, lse: torch.Tensor, context, **options):
    want_out, want_lse = (
        own_heads(x, axis, context) for x, axis in zip(expected(step, **options), (2, 1), strict=True)
    )
    # Probabilities, partial outputs and outputs are each rounded to bf16, with errors of up to 2^-9.
    assert (out.double() - want_out).abs().max() <= 3 * 2**-9 * step.keys.abs().amax()
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("interleave", [1, 64])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_decode(form, queries, interleave):
    step = Step(LENGTHS, heads=128, queries=queries, dtype=torch.bfloat16, device="cuda")
    options = {"interleave": interleave, "form": form}
    out, lse = rank_jobs.decode(step, page_size=64, **options)
    assert_close(step, out, lse, rank_jobs.context_parallel(interleave, form, False))


def test_the_next_step_with_more_queries_waits_for_pending_reads():
    step = Step(LENGTHS, heads=128, dtype=torch.bfloat16, device="cuda")
    other = Step(LENGTHS, heads=128, queries=4, dtype=torch.bfloat16, seed=1, device="cuda")
    out, lse = rank_jobs.decode_before(step, other)
    assert_close(step, out, lse, rank_jobs.context_parallel(1, "direct", False))


@pytest.mark.parametrize("form", FORMS)
def test_all_heads_on_every_rank(form):
    step = Step(LENGTHS, heads=64, dtype=torch.bfloat16, device="cuda")
    out, lse = rank_jobs.decode(step, interleave=8, form=form, all_heads=True, page_size=64, sink=True)
    assert_close(step, out, lse, rank_jobs.context_parallel(8, form, True), sink=True)


def test_sparse_decode_of_the_best_of_all_ranks():
    step = Step((0, 5, 700, 3001), heads=128, queries=2, dtype=torch.bfloat16, device="cuda")
    chosen, out, lse = rank_jobs.sparse_decode(step, 512, interleave=1, form=None, page_size=64)
    assert_close(step, out, lse, rank_jobs.context_parallel(1, None, False), chosen=chosen)


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_follows_the_lengths(form):
    """A step with its plan and its collectives is captured once, and replayed with longer requests."""
    step = Step((5, 300, 1), heads=128, queries=2, dtype=torch.bfloat16, device="cuda")
    context = rank_jobs.context_parallel(1, form, False)
    longest = Step((900, 900, 900), 128, 2, torch.bfloat16, device="cuda")
    mine = rank_jobs.shard(longest, context.sharding, 64)
    lengths = mine.cache_seqlens.clone()
    q = own_heads(step.q, 2, context)

    def run():
        plan = context.plan(mine.block_table, lengths, page_tokens=mine.page_tokens, queries=2)
        return context.decode(q, mine.cache, plan)

    lengths.copy_(torch.tensor(step.lengths))
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for several in ((5, 300, 1), (6, 301, 2), (900, 0, 64)):
        lengths.copy_(torch.tensor(several))
        graph.replay()
        replayed = tuple(x.clone() for x in captured)
        rank_jobs.same_bits(replayed, run())
