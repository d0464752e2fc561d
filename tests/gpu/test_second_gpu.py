"""Tensors on a GPU other than the current device, on which Triton would launch."""

import pytest
import torch
from support.operation_calls import CALLS

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
