"""The engine over several GPUs: in float32 transformers' tokens, in bf16 with CUDA graphs those of eager steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.engine_models import generated_by_transformers, model, prompt

from flashlatte.engine import Engine, SamplingParams
from flashlatte.engine.runner import Runner

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("group")]

# Some longer than a page of all ranks, and one that begins like another.
PROMPTS = [prompt(300), [*prompt(300)[:280], 7], prompt(3, 1), prompt(70, 2)]


def generate(
    source: Any, groups: list[list[list[int]]], sampling: SamplingParams, **options: Any
) -> tuple[list[tuple[list[int], list[float]]], int] | None:
    """Rank 0: tokens and log-probabilities of requests, group after group, and how many CUDA graphs there are."""
    settings: dict[str, Any] = {"num_pages": 64, "max_tokens": 96, "max_requests": 4}
    engine = Engine(source, tensor_parallel=dist.get_world_size(), **settings | options)
    if not engine.leads:
        engine.follow()
        return None
    with engine:
        outputs = [output for prompts in groups for output in engine.generate(prompts, sampling)]
    assert engine.pool.in_use == 0
    return [(output.tokens, output.logprobs) for output in outputs], len(engine.runner._graphs)


@pytest.mark.parametrize("family", ["DeepseekV3", "DeepseekV32"])
@pytest.mark.parametrize("keys_over_all", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
def test_greedy_tokens_are_transformers(family, keys_over_all, drafts):
    expected = [generated_by_transformers(family, tokens, 24) for tokens in PROMPTS]
    context_parallel = dist.get_world_size() if keys_over_all else 1
    source = copy.deepcopy(model(family)).cuda()
    groups = [PROMPTS[:1], PROMPTS[1:]]
    got = generate(source, groups, SamplingParams(24), context_parallel=context_parallel, drafts=drafts, graphs=False)
    assert got is None or [tokens for tokens, _ in got[0]] == expected


@pytest.mark.filterwarnings("error:decode steps run without CUDA graphs")
@pytest.mark.parametrize("keys_over_all", [False, True])
def test_graphs_give_what_eager_steps_give(keys_over_all):
    """Bit for bit: a group's prompts are computed in one step, so that its steps are of as many requests as a graph."""
    source = copy.deepcopy(model("DeepseekV3")).to("cuda", torch.bfloat16)
    groups = [PROMPTS[:1], [*PROMPTS[1:], prompt(150, 3)]]
    sampling = SamplingParams(80, logprobs=True)
    context_parallel = dist.get_world_size() if keys_over_all else 1
    eager, replayed = (
        generate(source, groups, sampling, max_tokens=1024, context_parallel=context_parallel, graphs=graphs)
        for graphs in (False, True)
    )
    if eager is not None and replayed is not None:
        assert replayed[0] == eager[0]
        assert eager[1] == 0
        assert replayed[1] > 0


@pytest.mark.filterwarnings("error:decode steps run without CUDA graphs")
@pytest.mark.parametrize("keys_over_all", [False, True])
def test_graphs_of_more_requests_than_a_step_has(keys_over_all, monkeypatch):
    """Three requests replay the graph of four: bit for bit what the same padded steps give eagerly."""
    source = copy.deepcopy(model("DeepseekV3")).to("cuda", torch.bfloat16)
    sampling = SamplingParams(80, logprobs=True)
    context_parallel = dist.get_world_size() if keys_over_all else 1
    replayed = generate(source, [PROMPTS[1:]], sampling, context_parallel=context_parallel)
    monkeypatch.setattr(Runner, "_padded", lambda runner, size, metadata: runner._logits(metadata, runner._rows[:size]))
    padded = generate(source, [PROMPTS[1:]], sampling, context_parallel=context_parallel)
    if padded is not None and replayed is not None:
        assert replayed[0] == padded[0]
        assert padded[1] == 0
        assert replayed[1] > 0
