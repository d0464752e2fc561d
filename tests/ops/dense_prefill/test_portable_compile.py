"""Compile tests of the portable kernels for a Hopper GPU, without a GPU."""

from __future__ import annotations

import pytest
import torch
from support.compile import SHARED_BYTES, Recorder, compile_launch

from flashlatte.ops.dense_prefill.portable import launch
from flashlatte.ops.dense_prefill.reference import DensePrefillGradients, DensePrefillParams
from flashlatte.runtime import machine

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="kernels are interpreted, not compiled")
KERNELS = ("forward_kernel", "row_sums_kernel", "keys_kernel", "queries_kernel")


@pytest.fixture
def recorders(monkeypatch) -> list[Recorder]:
    found = []
    for name in KERNELS:
        found.append(Recorder(getattr(launch, name)))
        monkeypatch.setattr(launch, name, found[-1])
    monkeypatch.setattr(launch, "gpu_class", lambda device: "hopper")
    return found


def run(head_dim: int, head_dim_v: int) -> None:
    def rows(width: int) -> torch.Tensor:
        return torch.empty(160, 4, width, dtype=torch.bfloat16)

    q, k, v, out, lse = rows(head_dim), rows(head_dim), rows(head_dim_v), rows(head_dim_v), torch.empty(160, 4)
    ends = torch.tensor([0, 40, 160], dtype=torch.int32)
    params = DensePrefillParams(q, k, v, ends, ends, 120, 0.2, 2**31 - 1, 0, empty_lse=float("-inf"))
    launch.forward(params, out, lse)
    gradients = rows(head_dim), rows(head_dim), rows(head_dim_v)
    launch.backward(params, DensePrefillGradients(out, lse, out, None, True, *gradients))


@pytest.mark.full
@pytest.mark.parametrize("dims", [(24, 12), pytest.param((64, 20), marks=pytest.mark.full)], ids=str)
def test_rows_that_begin_anywhere_are_multiplied_by_single_warps(recorders, dims):
    """The compiler miscompiles warpgroup products for such rows; ``compile_launch`` checks for that as well."""
    run(*dims)
    for recorder in recorders:
        compiled = compile_launch(recorder.fn, recorder.launches[0], 90)
        assert compiled.hgmma == 0
        assert (compiled.hmma > 0) == (recorder.fn.__name__ != "row_sums_kernel")
        assert compiled.shared <= SHARED_BYTES[90]
        assert compiled.spills <= 32
