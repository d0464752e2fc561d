"""DeepSeek-V4 in the engine: greedy tokens are transformers', however steps divide prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

from support.engine_models import generated_by_transformers, model, prompt

from flashlatte.engine import Engine, SamplingParams
from flashlatte.layers.v4.builder import V4Metadata
from flashlatte.layers.v4.step import V4Step
from flashlatte.layers.v4.workspace import WorkspaceLimits

FAMILY, LENGTHS = "DeepseekV4", (1, 5, 31, 19)


def engine(**options: Any) -> Engine:
    sizes: dict[str, Any] = {"num_pages": 24, "page_size": 8, "max_tokens": 12}
    return Engine(model(FAMILY), **sizes | options)


def check(served, lengths=LENGTHS, new=9):
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    outputs = served.generate(prompts, SamplingParams(max_new_tokens=new))
    for tokens, output in zip(prompts, outputs, strict=True):
        assert output.tokens == generated_by_transformers(FAMILY, tokens, new)
    assert served.pool.in_use == 0


@pytest.mark.parametrize("options", [{}, {"max_tokens": 5, "page_size": 16, "num_pages": 12}], ids=["12", "5"])
def test_mixed_lengths(options):
    check(engine(**options))


def test_a_pool_so_small_that_requests_give_way_and_begin_anew():
    small = engine(num_pages=7, max_requests=3)
    check(small)
    assert small.statistics()["recomputed"] > 0


def test_more_requests_than_run_at_a_time():
    """Who comes later gets the states' place of who has ended."""
    check(engine(max_requests=2, max_tokens=30), lengths=(9, 21, 4, 13, 7), new=4)


def replayed(served: Engine) -> Engine:
    """Steps that generate run as graphs do: what the first of a size said of its tokens is called again."""
    runner, first, buffers = served.runner, {}, []

    def padded(size: int, metadata: V4Metadata) -> torch.Tensor:
        if not any(metadata.buffers is known for known in buffers):
            first.clear()
            buffers.append(metadata.buffers)
        return runner._logits(first.setdefault(size, metadata), runner._rows[:size])

    runner._padded, runner._use_graphs = padded, True
    return served


@pytest.mark.parametrize("options", [{}, {"num_pages": 7, "max_requests": 3}], ids=["at ease", "giving way"])
def test_steps_that_generate_as_graphs(options):
    check(replayed(engine(**options)))


def test_a_prompt_over_a_workspace(monkeypatch):
    monkeypatch.setitem(V4Step.of_spans.__func__.__kwdefaults__, "limits", WorkspaceLimits(queries=141))
    check(engine(max_tokens=150, num_pages=40), lengths=(141, 6), new=3)


def test_requests_that_begin_alike_share_nothing():
    served = engine()
    shared = prompt(24)
    for last in (1, 2):
        (output,) = served.generate([[*shared, last]], SamplingParams(max_new_tokens=3))
        assert output.tokens == generated_by_transformers(FAMILY, [*shared, last], 3)
    assert served.statistics()["cached_tokens"] == 0


def test_pages_as_large_as_indexers_want_them():
    served = Engine(model(FAMILY), num_pages=2)
    assert served.pool.page_size == 256


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 12}, "^page_size must be a multiple of 8, so that groups end with it, got 12$"),
        ({"drafts": 2}, "^drafts must be 0 for deepseek_v4, whose pages hold no states, got 2$"),
        ({"host_pages": 4}, "^host_pages must be 0 for deepseek_v4, whose pages hold no states, got 4$"),
        ({"tensor_parallel": 2}, r"^tensor_parallel and context_parallel must be 1 for deepseek_v4, got \(2, 1\)$"),
        ({"cache_format": "model1"}, "^head_dim of format model1 is 512, got 32$"),
        ({"cache_format": "bf16"}, "^cache_format must be model1 or that of torch.float32, got 'bf16'$"),
        ({"cache_format": "v32"}, "^head_dim of format v32 is 576, got 32$"),
        ({"cache_format": "fp8"}, "^cache_format must be model1 or that of torch.float32, got 'fp8'$"),
    ],
)
def test_what_is_not_served(options, message):
    with pytest.raises(ValueError, match=message):
        engine(**options)
