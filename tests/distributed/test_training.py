"""A training step over 2 and 3 processes against one process."""

import pytest
import torch
from support import rank_training_jobs
from support.indexer_loss_calls import with_gradients

from flashlatte import indexer_loss

pytestmark = pytest.mark.parametrize("ranks", [2, 3], indirect=True)


@pytest.mark.parametrize("dense", [False, True])
def test_the_target_is_the_mean_over_the_heads_of_all_ranks(ranks, dense):
    """7 heads. Every rank has the whole loss and the whole gradients."""
    expected = with_gradients(indexer_loss, rank_training_jobs.loss_arguments(dense))
    first, *others = ranks.run(rank_training_jobs.loss_of_heads, dense)
    for result, wanted in zip(first, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-12)
    for results in others:
        assert all(result.equal(same) for result, same in zip(results, first, strict=True))
