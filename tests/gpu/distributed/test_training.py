"""A training step over several GPUs, compared with the same step on one GPU, in float32."""

from __future__ import annotations

import pytest
from support import rank_training_jobs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("group")]


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("kind", ["sparse", "warm-up", "dense"])
def test_tokens_over_ranks(kind, zigzag):
    rank_training_jobs.tokens_over_ranks(kind, zigzag, device="cuda", limit=1e-4)


@pytest.mark.parametrize("kind", ["sparse", "warm-up", "dense", "without q_lora"])
def test_heads_over_ranks(kind):
    rank_training_jobs.heads_over_ranks(kind, device="cuda", limit=1e-4)
