"""``precision="fp8"`` on a GPU that has no kernel for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashlatte import dense_decode, sparse_prefill
from flashlatte.runtime import machine
from flashlatte.testing.cases import DenseDecodeCase, SparsePrefillCase

CALLS = {
    "dense_decode": (dense_decode, DenseDecodeCase(2, 1, 100, 16, cache_dtype=torch.float8_e4m3fn)),
    "sparse_prefill": (sparse_prefill, SparsePrefillCase(3, 90, 16, 70)),
}


@pytest.mark.parametrize("name", CALLS)
def test_only_a_named_backend_runs_it_in_pytorch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(machine, "compute_capability", lambda _: (8, 0))
    operation: Callable[..., Any] = CALLS[name][0]
    arguments = CALLS[name][1].inputs()
    message = rf"^no kernel runs this call of {name} with precision='fp8': hopper needs .*; portable has no "
    with FakeTensorMode():
        fake = {
            key: torch.empty(value.shape, dtype=value.dtype, device="cuda") if torch.is_tensor(value) else value
            for key, value in arguments.items()
        }
        with pytest.raises(ValueError, match=message):
            operation(**fake, precision="fp8")
        assert operation(**fake, precision="fp8", backend="reference")[0].device.type == "cuda"
        assert operation(**fake)[0].device.type == "cuda"
