"""A process that collects kernels for an absent GPU has its own GPU and driver again afterwards."""

import contextlib
import json
from typing import Any

import pytest
import torch
import triton

from flashlatte import cli, flashinfer
from flashlatte.precompile import command
from flashlatte.runtime import machine, precompile

CPU = torch.device("cpu")
GPUS = [machine.GPU((9, 0), 132), machine.GPU((8, 0), 108)]


def driver() -> Any:
    return triton.runtime.driver.active


def facts():
    """What calls and Triton see of the machine, and the driver object itself."""
    active = triton.runtime.driver._active
    return active, machine.device_type(CPU), machine.compute_capability(CPU), machine.num_sms(CPU)


def test_inside_triton_compiles_for_the_gpu():
    before = facts()
    for gpu in GPUS:
        with precompile.assuming(gpu):
            assert driver().get_current_target().arch == 10 * gpu.capability[0]
            assert facts()[1:] == ("cuda", *gpu)
        assert facts() == before


def test_absent_gpus_share_no_kernels():
    """A function keeps compiled kernels by the number of the device."""
    numbers = []
    for gpu in GPUS:
        with precompile.assuming(gpu):
            numbers.append(driver().get_current_device())
    assert len(set(numbers)) == 2
    assert min(numbers) > 1000


def test_contexts_nest():
    before = facts()
    with precompile.assuming(GPUS[0]):
        outside = facts()
        with precompile.assuming(GPUS[1]):
            assert facts() != outside
        assert facts() == outside
    assert facts() == before


def test_an_error_restores_the_driver():
    before = facts()
    with pytest.raises(KeyError), precompile.assuming(GPUS[0]), precompile.collected():
        raise KeyError
    assert facts() == before
    # Triton runs nothing for a CPU tensor then.
    rows = torch.ones(2, 3, 4)
    flashinfer.merge_state(rows, rows[..., 0], rows, rows[..., 0])


@pytest.mark.parametrize("error", [None, ValueError, RuntimeError, KeyboardInterrupt])
def test_the_command_restores_the_driver(error, tmp_path, monkeypatch):
    def collect(*_):
        assert driver().get_current_target().arch == 90
        if error is not None:
            raise error("no steps")
        return []

    before = facts()
    monkeypatch.setattr(command, "_variants", collect)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    arguments = ["compile", "--model", str(tmp_path), "--target", "sm_90", "--list"]
    with pytest.raises(RuntimeError) if error is RuntimeError else contextlib.nullcontext():
        assert (cli.main(arguments) == 0) == (error is None)
    assert facts() == before
