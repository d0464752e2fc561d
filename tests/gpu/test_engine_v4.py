"""DeepSeek-V4's decode steps in the engine: replayed CUDA graphs compared with eager steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engine_models import VOCABULARY, greedy, large_v4, prompt

from flashlatte.engine import Engine
from flashlatte.engine.batch import StepBatch

pytestmark = pytest.mark.gpu
# Generating 40 tokens each ends groups of 4 and of 128, and pages of 256.
LENGTHS = (3, 100, 240, 500)


@pytest.fixture(scope="module")
def model() -> Any:
    return large_v4().to("cuda", torch.bfloat16)


@pytest.mark.parametrize("cache_format", ["model1", "bf16"])
@pytest.mark.filterwarnings("error:decode steps run without CUDA graphs")
def test_replayed_steps_are_eager_ones(model: Any, cache_format: str) -> None:
    served = Engine(model, cache_format=cache_format, num_pages=12, max_num_seqs=4, max_num_batched_tokens=512)
    runner, steps, batches, apart = served.runner, 0, [], []
    graphed, plan = runner._padded, runner._plan

    def planned(batch: StepBatch, pad_to: int | None) -> Any:
        batches.append(batch)
        return plan(batch, pad_to)

    def padded(size: int, metadata: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        requests = len(batches[-1].counts)
        # Each runs the step again: what it writes is the same.
        eager = runner._logits(metadata, runner._rows[:size]).clone()
        new = runner._logits(plan(batches[-1], None), runner._rows[:requests]).clone()
        replayed = graphed(size, metadata)
        assert replayed.equal(eager)
        if size == requests:
            apart.append(((new - replayed).norm() / new.norm()).item())
        return replayed

    runner._padded, runner._plan = padded, planned
    sampling = greedy(40)
    # The second time with more state slots: the states move, and graphs are captured again.
    for places in ([3, 2, 1, 0], [7, 6, 5, 4]):
        runner._free_state_indices, before = places, steps
        outputs = served.generate([prompt(length, seed) for seed, length in enumerate(LENGTHS)], sampling)
        assert all(
            len(output.outputs[0].token_ids) == 40 and max(output.outputs[0].token_ids) < VOCABULARY
            for output in outputs
        )
        assert steps >= before + 39
        assert 4 in runner._graphs
    # A separate step has narrower tables, so that keys are split differently.
    assert max(apart) < 0.05


def test_a_step_that_generates_waits_for_nothing_but_the_last_ones_tokens(model: Any) -> None:
    served = Engine(model, cache_format="model1", num_pages=12, max_num_seqs=4)
    for seed in range(4):
        served.add(prompt(245, seed), greedy(40))
    for _ in range(8):
        served.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        # Across the end of a page, and of groups.
        for _ in range(10):
            assert len(served.step()) == 4
    finally:
        torch.cuda.set_sync_debug_mode("default")
