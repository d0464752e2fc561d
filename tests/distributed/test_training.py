"""A training step over 2 and 3 processes, compared with one process."""

import pytest
import torch
from support import rank_training_jobs
from support.indexer_loss_calls import with_gradients

from flashlatte import indexer_loss
from flashlatte.distributed import ContextShard

two_or_three = pytest.mark.parametrize("ranks", [2, 3], indirect=True)


@two_or_three
@pytest.mark.parametrize("dense", [False, True])
def test_the_target_is_the_mean_over_the_heads_of_all_ranks(ranks, dense):
    """7 heads. Every rank has the complete loss and gradients."""
    expected = with_gradients(indexer_loss, rank_training_jobs.loss_arguments(dense))
    first, *others = ranks.run(rank_training_jobs.loss_of_heads, dense)
    for result, wanted in zip(first, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-12)
    for results in others:
        assert all(result.equal(same) for result, same in zip(results, first, strict=True))


@two_or_three
@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("kind", ["sparse", "warm-up", "dense", "head", "channel", "query"])
def test_tokens_over_ranks(ranks, kind, zigzag):
    """35 tokens, so that ranks have different numbers of tokens."""
    ranks.run(rank_training_jobs.tokens_over_ranks, kind, zigzag)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_checkpoints_of_ranks(ranks):
    ranks.run(rank_training_jobs.tokens_over_ranks, "sparse", True, checkpointed=True)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("kind", ["warm-up", "dense"])
def test_autocast_of_ranks(ranks, kind):
    ranks.run(rank_training_jobs.tokens_in_autocast, kind)


@two_or_three
@pytest.mark.parametrize("kind", ["sparse", "warm-up", "dense", "without q_lora", "head", "channel", "query"])
def test_heads_over_ranks(ranks, kind):
    """7 heads, so that ranks have different numbers of heads."""
    ranks.run(rank_training_jobs.heads_over_ranks, kind)


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_heads_and_tokens_over_ranks(ranks):
    ranks.run(rank_training_jobs.heads_over_ranks, "sparse", 2)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_wrong_numbers_of_tokens(ranks):
    for failure in ranks.outcomes(ContextShard, 3):
        assert failure.message == "ValueError: tokens must be at least the 4 blocks of 2 ranks, got 3"
    for failure in ranks.outcomes(rank_training_jobs.different_batches):
        assert "ContextShard needs the same arguments on all ranks: rank 0 has tokens 8" in failure.message
    for message in ranks.run(rank_training_jobs.wrong_rows):
        assert message == "hidden must have the 18 tokens of this rank, got 35" or "17 tokens" in message


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("fact", ["cu_seqlens", "dtype", "dense", "trained indexer", "heads"])
def test_steps_that_differ_raise_before_a_collective(ranks, fact):
    for failure in ranks.outcomes(rank_training_jobs.differing_steps, fact):
        assert f"forward_training needs the same arguments on all ranks: rank 0 has {fact} " in failure.message


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_heads_and_tokens_need_different_groups(ranks):
    for failure in ranks.outcomes(rank_training_jobs.heads_and_tokens_over_the_same_ranks):
        assert "forward_training needs the same arguments on all ranks: rank 0 has blocks (range(" in failure.message
