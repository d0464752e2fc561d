from __future__ import annotations

import pytest
import torch
from support.recording import Recording

from flashlatte.kernels.triton.fp8 import converts_e4m3
from flashlatte.kernels.triton.online_softmax import gpu_class
from flashlatte.runtime import machine
from flashlatte.runtime.triton_internals import clusters_fill

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="the interpreter has no properties of GPUs")

CPU = torch.device("cpu")


def properties() -> tuple[object, ...]:
    return gpu_class(CPU), converts_e4m3(CPU), machine.num_sms(CPU), clusters_fill(CPU, 2)


def test_properties_are_those_of_the_assumed_gpu_and_afterwards_of_the_machine() -> None:
    before = properties()
    with machine.assuming(machine.GPU((9, 0), 132)):
        assert properties() == ("hopper", True, 132, True)
        with machine.assuming(machine.GPU((8, 0), 108)):
            assert properties() == ("ampere", False, 108, False)
        assert properties() == ("hopper", True, 132, True)
    assert properties() == before


def test_recordings_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = properties()
    record = Recording(monkeypatch)
    with record.assuming(None):
        assert properties() == ("other", False, 132, False)
    with record.assuming(90):
        assert properties()[0] == "hopper"
    assert properties() == before
