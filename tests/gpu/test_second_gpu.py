"""Tensors on a GPU other than the current device, on which Triton would launch."""

import copy
import threading

import pytest
import torch
from support.engine_models import greedy, model, prompt
from support.operation_calls import CALLS

from flashlatte.engine import Engine
from flashlatte.runtime import triton_internals

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_kernels_run_where_tensors_are(number):
    launched_on: list[int] = []
    noting = triton_internals.counting_launches(lambda _: launched_on.append(torch.cuda.current_device()))
    with noting, torch.device("cuda:1"):
        CALLS[number]()
    torch.cuda.synchronize(1)
    assert set(launched_on) == {1}
    assert torch.cuda.current_device() == 0


@pytest.mark.filterwarnings("error:decode steps run without CUDA graphs")
def test_an_engine_runs_on_its_gpu_in_a_thread_with_another_current_one():
    """Its events and graphs belong to its GPU. The first engine's graphs are on the other GPU."""
    half = copy.deepcopy(model("DeepseekV3").cpu()).to(torch.bfloat16)
    prompts = [prompt(40, seed) for seed in range(4)]

    def generate(device: str, graphs: bool) -> list[list[int]]:
        served = Engine(copy.deepcopy(half).to(device), max_num_seqs=4, num_pages=64, cuda_graphs=graphs)
        found: list[list[int]] = []
        thread = threading.Thread(
            target=lambda: found.extend(out.outputs[0].token_ids for out in served.generate(prompts, greedy(60)))
        )
        thread.start()
        thread.join()
        assert bool(served.runner._graphs) == graphs
        return found

    expected = generate("cuda:0", graphs=False)
    assert [generate(device, graphs=True) for device in ("cuda:0", "cuda:1")] == [expected] * 2
    assert torch.cuda.current_device() == 0
