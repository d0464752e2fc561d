"""Empty steps on a GPU, for which an empty grid would be a launch error."""

from __future__ import annotations

import pytest
import torch
from gpu.harness import DEVICE
from ops.test_empty import CALLS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CALLS)
def test_empty_in_empty_out(name):
    call, shapes = CALLS[name]
    with torch.device(DEVICE):
        results = call()
        torch.cuda.synchronize()
    assert tuple(tuple(result.shape) for result in results) == shapes
    assert all(result.device.type == "cuda" for result in results)


@pytest.mark.parametrize("name", [name for name in CALLS if "decode" in name or "prefill" in name])
def test_in_a_cuda_graph(name):
    call, shapes = CALLS[name]
    graph = torch.cuda.CUDAGraph()
    with torch.device(DEVICE):
        call()
        with torch.cuda.graph(graph):
            results = call()
        graph.replay()
        torch.cuda.synchronize()
    assert tuple(tuple(result.shape) for result in results) == shapes
