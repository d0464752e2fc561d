"""The engine on a GPU: decode steps as CUDA graphs, scheduled while the previous step runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.engine_models import chosen_logprobs, generated_by_transformers, greedy, model, prompt
from support.threads import at_the_same_time

from flashlatte.engine import Engine, Model

pytestmark = pytest.mark.gpu
LENGTHS = (3, 70, 140, 1, 26, 64, 65)


def generate(swap_space: int = 0, **options: Any) -> tuple[list[list[int]], dict[str, float]]:
    served = Engine(model("DeepseekV3").cuda(), max_num_seqs=6, swap_space=swap_space, **options)
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    outputs = served.generate(prompts, greedy(70))
    torch.cuda.synchronize()
    assert served.pool.in_use == 0
    return [output.outputs[0].token_ids for output in outputs], served.statistics()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    cpu = model("DeepseekV3").cpu()
    assert cpu.device.type == "cpu"
    return [generated_by_transformers("DeepseekV3", prompt(length, seed), 70) for seed, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("num_speculative_tokens", [0, 3])
def test_greedy_tokens_are_transformers(expected, num_speculative_tokens):
    tokens, _ = generate(
        num_pages=64, max_num_batched_tokens=96, cuda_graphs=False, num_speculative_tokens=num_speculative_tokens
    )
    assert tokens == expected


def test_models_that_cannot_be_captured_run_without_graphs(expected):
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        tokens, _ = generate(num_pages=64, max_num_batched_tokens=96)
    assert tokens == expected


@pytest.mark.filterwarnings("error:decode steps run without CUDA graphs")
def test_graphs_equal_eager_steps():
    half = copy.deepcopy(model("DeepseekV3").cpu()).to("cuda", torch.bfloat16)
    sampling = greedy(80, logprobs=0)

    def generate(graphs: bool) -> list[tuple[list[int], list[float]]]:
        served = Engine(half, max_num_seqs=4, num_pages=64, cuda_graphs=graphs)
        for seed in range(4):
            served.add(prompt(40, seed), sampling)
        done = []
        while served.unfinished:
            done += [output for output in served.step() if output.outputs[0].finish_reason is not None]
            # Memory that a graph reads but does not own is overwritten.
            torch.full((1 << 16,), -1, device="cuda")
            torch.full((4,), 2**40, device="cuda")
        assert bool(served.runner._graphs) == graphs
        return [
            (output.outputs[0].token_ids, chosen_logprobs(output))
            for output in sorted(done, key=lambda output: output.request_id)
        ]

    assert generate(True) == generate(False)


@pytest.mark.filterwarnings("error:decode steps run without CUDA graphs")
def test_engines_in_two_threads_capture_and_allocate_at_the_same_time():
    half = copy.deepcopy(model("DeepseekV3").cpu()).to("cuda", torch.bfloat16)
    prompts = [[prompt(40 + seed, seed) for seed in range(4 * number, 4 * number + 4)] for number in range(2)]
    kept: list[torch.Tensor] = []

    def generate(number: int, graphs: bool = True) -> list[list[int]]:
        served = Engine(half, max_num_seqs=4, num_pages=64, cuda_graphs=graphs)
        done = []
        for step in range(4):
            kept.append(torch.empty(2**21 + 2**16 * (4 * number + step), device="cuda"))
            done += served.generate(prompts[number][: step + 1], greedy(20))
        assert bool(served.runner._graphs) == graphs
        return [output.outputs[0].token_ids for output in done]

    expected = [generate(number, graphs=False) for number in range(2)]
    for _ in range(3):
        torch.cuda.empty_cache()
        assert at_the_same_time(generate, threads=2) == expected


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {3: 1.0}, "logprobs": 3},
        {"allowed_token_ids": range(90), "suppress_tokens": (4,), "min_tokens": 30, "stop_token_ids": (5,)},
    ],
)
def test_a_step_that_generates_waits_for_nothing_but_the_last_ones_tokens(sampling):
    half = copy.deepcopy(model("DeepseekV3").cpu()).to("cuda", torch.bfloat16)
    served = Engine(half, max_num_seqs=4, num_pages=64)
    for seed in range(4):
        served.add(prompt(48, seed), greedy(40, **sampling))
    for _ in range(10):
        served.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        # Over the end of a page.
        for _ in range(10):
            assert len(served.step()) == 4
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("error:decode steps run without CUDA graphs")
def test_batch_invariant_bits_do_not_depend_on_other_requests():
    half = copy.deepcopy(model("DeepseekV3").cpu()).to("cuda", torch.bfloat16)
    sampling = greedy(40, logprobs=0)

    def generated(others: list[list[int]], **options: Any) -> tuple[list[int], list[float]]:
        served = Engine(Model(half, batch_invariant=True), max_num_seqs=6, max_num_batched_tokens=96, **options)
        output = served.generate([*others, prompt(140)], sampling)[-1]
        return output.outputs[0].token_ids, chosen_logprobs(output)

    others = [prompt(length, seed) for seed, length in enumerate(LENGTHS, 1)]
    alone = generated([], num_pages=64)
    assert generated(others, num_pages=64) == alone
    assert generated(others[:2], num_pages=64, cuda_graphs=False) == alone
    assert generated(others, num_pages=7, enable_prefix_caching=False) == alone


@pytest.mark.parametrize("swap_space", [0, 16])
def test_pages_that_move_to_the_host_come_back_as_they_were(expected, swap_space):
    tokens, statistics = generate(swap_space, num_pages=6, enable_prefix_caching=False, cuda_graphs=False)
    assert tokens == expected
    assert statistics["swapped" if swap_space else "recomputed"] > 0
