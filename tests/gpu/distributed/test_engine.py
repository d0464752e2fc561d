"""The engine over several GPUs: in float32 transformers' tokens, in bf16 with CUDA graphs those of eager steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.engine_models import generated_by_transformers, model, prompt

from flashlatte.engine import Engine, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("group")]

# Some longer than a page of all ranks, and one that begins like another.
PROMPTS = [prompt(300), [*prompt(300)[:280], 7], prompt(3, 1), prompt(70, 2)]


def generate(source: Any, new: int, **options: Any) -> tuple[list[list[int]], int] | None:
    """Rank 0: every request's tokens, and how many CUDA graphs there are."""
    settings: dict[str, Any] = {"num_pages": 64, "max_tokens": 96, "max_requests": 4}
    engine = Engine(source, tensor_parallel=dist.get_world_size(), **settings | options)
    if not engine.leads:
        engine.follow()
        return None
    with engine:
        first = engine.generate(PROMPTS[:1], SamplingParams(new))
        outputs = [*first, *engine.generate(PROMPTS[1:], SamplingParams(new))]
    assert engine.pool.in_use == 0
    return [output.tokens for output in outputs], len(engine.runner._graphs)


@pytest.mark.parametrize("family", ["DeepseekV3", "DeepseekV32"])
@pytest.mark.parametrize("keys_over_all", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
def test_greedy_tokens_are_transformers(family, keys_over_all, drafts):
    expected = [generated_by_transformers(family, tokens, 24) for tokens in PROMPTS]
    context_parallel = dist.get_world_size() if keys_over_all else 1
    source = copy.deepcopy(model(family)).cuda()
    got = generate(source, 24, context_parallel=context_parallel, drafts=drafts, graphs=False)
    assert got is None or got[0] == expected


@pytest.mark.filterwarnings("error:decode steps run without CUDA graphs")
@pytest.mark.parametrize("keys_over_all", [False, True])
def test_graphs_give_what_eager_steps_give(keys_over_all):
    source = copy.deepcopy(model("DeepseekV3")).to("cuda", torch.bfloat16)
    context_parallel = dist.get_world_size() if keys_over_all else 1
    eager, replayed = (
        generate(source, 80, context_parallel=context_parallel, graphs=graphs) for graphs in (False, True)
    )
    if eager is not None and replayed is not None:
        assert replayed[0] == eager[0]
        assert eager[1] == 0
        assert replayed[1] > 0
