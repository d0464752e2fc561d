"""The engine on several GPUs: in float32 transformers' tokens, in bf16 with CUDA graphs those of eager steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import fp8_linears
from support.engine_models import chosen_logprobs, generated_by_transformers, greedy, large_v4, model, prompt

from flashlatte.engine import Engine, SamplingParams
from flashlatte.engine.runner import Runner

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("group")]

# Some longer than a page of all ranks, and one that begins like another.
PROMPTS = [prompt(300), [*prompt(300)[:280], 7], prompt(3, 1), prompt(70, 2)]


def generate(
    source: Any, groups: list[list[list[int]]], sampling: SamplingParams, **options: Any
) -> tuple[list[tuple[list[int], list[float]]], int] | None:
    """On rank 0: tokens and log-probabilities of each group of requests, and the number of CUDA graphs."""
    settings: dict[str, Any] = {"num_pages": 64, "max_num_batched_tokens": 96, "max_num_seqs": 4}
    engine = Engine(source, tensor_parallel=dist.get_world_size(), **settings | options)
    if not engine.leads:
        engine.follow()
        return None
    with engine:
        outputs = [output for prompts in groups for output in engine.generate(prompts, sampling)]
    assert engine.pool.in_use == 0
    return [(output.outputs[0].token_ids, chosen_logprobs(output)) for output in outputs], len(engine.runner._graphs)


@pytest.mark.parametrize(
    ("family", "keys_over_all"),
    [("DeepseekV3", False), ("DeepseekV3", True), ("DeepseekV32", False), ("DeepseekV32", True), ("DeepseekV4", False)],
)
@pytest.mark.parametrize("num_speculative_tokens", [0, 3])
def test_greedy_tokens_are_transformers(family, keys_over_all, num_speculative_tokens):
    expected = [generated_by_transformers(family, tokens, 24) for tokens in PROMPTS]
    context_parallel = dist.get_world_size() if keys_over_all else 1
    source = copy.deepcopy(model(family)).cuda()
    groups = [PROMPTS[:1], PROMPTS[1:]]
    got = generate(
        source,
        groups,
        greedy(24),
        context_parallel=context_parallel,
        num_speculative_tokens=num_speculative_tokens,
        cuda_graphs=False,
    )
    assert got is None or [tokens for tokens, _ in got[0]] == expected


@pytest.mark.filterwarnings("error:decode steps run without CUDA graphs")
@pytest.mark.parametrize("keys_over_all", [False, True])
def test_graphs_equal_eager_steps(keys_over_all):
    """Bitwise equal: the prompts of a group are computed in one step, so that its steps have the batch size of a
    graph."""
    source = copy.deepcopy(model("DeepseekV3")).to("cuda", torch.bfloat16)
    groups = [PROMPTS[:1], [*PROMPTS[1:], prompt(150, 3)]]
    sampling = greedy(80, logprobs=0)
    context_parallel = dist.get_world_size() if keys_over_all else 1
    eager, replayed = (
        generate(
            source, groups, sampling, max_num_batched_tokens=1024, context_parallel=context_parallel, cuda_graphs=graphs
        )
        for graphs in (False, True)
    )
    if eager is not None and replayed is not None:
        assert replayed[0] == eager[0]
        assert eager[1] == 0
        assert replayed[1] > 0


@pytest.mark.filterwarnings("error:decode steps run without CUDA graphs")
@pytest.mark.parametrize("keys_over_all", [False, True])
def test_graphs_of_more_requests_than_a_step_has(keys_over_all, monkeypatch):
    """Three requests replay the graph for four: bitwise equal to the same padded steps without a graph."""
    source = copy.deepcopy(model("DeepseekV3")).to("cuda", torch.bfloat16)
    sampling = greedy(80, logprobs=0)
    context_parallel = dist.get_world_size() if keys_over_all else 1
    replayed = generate(source, [PROMPTS[1:]], sampling, context_parallel=context_parallel)
    monkeypatch.setattr(Runner, "_padded", lambda runner, size, metadata: runner._logits(metadata, runner._rows[:size]))
    padded = generate(source, [PROMPTS[1:]], sampling, context_parallel=context_parallel)
    if padded is not None and replayed is not None:
        assert replayed[0] == padded[0]
        assert padded[1] == 0
        assert replayed[1] > 0


def saved(path: Path, save: Callable[[Path], None]) -> Path:
    """The folder in which rank 0 has saved a model: transformers saves on rank 0 only."""
    if dist.get_rank() == 0:
        save(path)
    folders = [path]
    dist.broadcast_object_list(folders)
    return folders[0]


def alone(source: Any, prompts: list[list[int]], sampling: SamplingParams, **options: Any) -> list[Any]:
    """Outputs of a single-process engine on each rank, created before the engine over all ranks (both would not fit in
    memory)."""
    outputs = Engine(source, num_pages=64, **options).generate(prompts, sampling)
    dist.barrier()
    return [(output.outputs[0].token_ids, chosen_logprobs(output)) for output in outputs]


def differences(got: list[Any], expected: list[Any]) -> torch.Tensor:
    """Differences of log-probabilities as long as tokens are equal; at the first different token, both must have been
    equally probable. Sums over ranks round to bf16 in another order."""
    found = []
    for (tokens, logprobs), (tokens_alone, logprobs_alone) in zip(got, expected, strict=True):
        same = [one == other for one, other in zip(tokens, tokens_alone, strict=True)]
        until = min(len(same), [*same, False].index(False) + 1)
        found += [abs(one - other) for one, other in zip(logprobs[:until], logprobs_alone[:until], strict=True)]
    return torch.tensor(found)


# Of DeepSeek-V3's heads; two ranks have whole blocks of 128 of everything that they divide. Each token takes all
# experts, as what is rounded otherwise may choose others.
FLOAT8 = {"num_experts_per_tok": 4, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
FLOAT8 |= {"q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@pytest.mark.filterwarnings("error:decode steps run without CUDA graphs")
def test_a_float8_checkpoint_is_divided(tmp_path):
    """Read as slices, with transformers' fp8 kernels."""
    from transformers.integrations import finegrained_fp8

    try:
        finegrained_fp8.load_finegrained_fp8_kernel()
    except (ImportError, OSError) as error:
        pytest.skip(f"transformers has no kernels of float8 weights here: {error}")
    source = copy.deepcopy(model(**FLOAT8)).bfloat16()
    path = saved(tmp_path, lambda path: fp8_linears.save(source, path, block=128))
    sampling = greedy(24, logprobs=0)
    expected = alone(path, PROMPTS, sampling)
    got = generate(path, [PROMPTS], sampling)
    if got is not None:
        # Activations rounded otherwise may become other numbers of e4m3: on a CPU that makes 0.04 on average, 0.2 at
        # most of 298 tokens. Where one block of each weight has twice its scale, the average is 0.38.
        found = differences(got[0], expected)
        assert found.mean() < 0.1
        assert found.max() < 0.4
        assert got[1] > 0


@pytest.mark.filterwarnings("error:decode steps run without CUDA graphs")
@pytest.mark.parametrize("cache_format", ["model1", "bf16"])
def test_deepseek_v4s_groups_of_heads(cache_format, tmp_path):
    """Replayed steps are bitwise equal to eager ones. From a checkpoint; all experts and groups of tokens are selected,
    as above."""
    source = large_v4(num_experts_per_tok=4, index_topk=256).bfloat16()
    path = saved(tmp_path, source.save_pretrained)
    prompts = [prompt(length, seed) for seed, length in enumerate((3, 100, 240, 500))]
    options: dict[str, Any] = {"cache_format": cache_format, "max_num_batched_tokens": 1024}
    sampling = greedy(40, logprobs=0)
    expected = alone(path, prompts, sampling, **options)
    eager, replayed = (generate(path, [prompts], sampling, cuda_graphs=graphs, **options) for graphs in (False, True))
    if eager is not None and replayed is not None:
        assert replayed[0] == eager[0]
        assert replayed[1] > 0
        assert differences(eager[0], expected).max() < 0.1
