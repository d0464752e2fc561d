"""Calls from several threads at the same time."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from support.isolation import TESTS
from support.repeated_kernel import Add, launch, numbers, operation
from support.threads import at_the_same_time
from triton import knobs

from flashlatte.runtime import recording, repeat
from flashlatte.runtime.triton_internals import counting_launches


def test_a_recording_that_ends_hides_no_launch_from_another(add: Add) -> None:
    """Triton calls the hooks of a launch one after another: first that of the recording in the other thread, which then
    ends, and last our own."""
    started, ends = threading.Event(), threading.Event()

    def other() -> None:
        with counting_launches(recording.Recording().count):
            started.set()
            ends.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert started.wait(60)

    def end_other(_: object) -> None:
        ends.set()
        thread.join(60)

    call, ran = operation(add)
    a, b = numbers(add, 4), numbers(add, 4)
    with counting_launches(end_other):
        call(a, b)
    assert not thread.is_alive()
    call(a, b)
    assert (len(ran), knobs.runtime.launch_enter_hook.calls) == (1, [])


def test_first_calls_in_threads_record_each_its_own_launches(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "_MAX_KEYS", 12)  # so that entries are replaced too
    tensors = {size: (numbers(add, size), numbers(add, size)) for size in range(1, 17)}
    scratch: dict[int, torch.Tensor] = {}

    def work(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, number: float) -> None:
        kept = torch.empty_strided(a.shape, a.stride())
        launch(add, kept, a, b, number)
        launch(add, out, kept, b, 0.0)
        scratch[threading.get_ident()] = kept  # so that no other thread's has this address

    call, ran = operation(add, work)

    def check(number: int) -> None:
        for step in range(40):
            a, b = tensors[1 + (step * (number + 1)) % 16]
            (result,) = call(a, b, number=float(step % 2))
            assert torch.equal(result, a + b + step % 2 + b)

    at_the_same_time(check)
    assert len(ran) >= 32
    assert knobs.runtime.launch_enter_hook.calls == []


# As the first calls of kernels in threads: each loads an implementation, whose function then imports its modules.
FIRST_KERNELS = """
import importlib, random, sys
from pathlib import Path
sys.path.insert(0, TESTS)
import torch
from support.threads import at_the_same_time
from flashlatte import ops
from flashlatte.runtime import dispatch
ops.load()
assert "triton" not in sys.modules
root = Path(ops.__file__).parent
files = [path.relative_to(root).with_suffix("") for path in root.rglob("*.py") if path.stem in ("launch", "portable")]
modules = [".".join(("flashlatte.ops", *file.parts)) for file in files]
operations = [name for name in dispatch.operations() if "portable" in dispatch._REGISTRY[name]]
errors = []

def work(number):
    order = random.Random(8 * SEED + number)
    for name in order.sample(modules, len(modules)):
        try:
            dispatch.implementation(order.choice(operations), "portable")
            importlib.import_module(name)
        except Exception as error:
            errors.append(f"{name}: {error!r}")

at_the_same_time(work)
assert not errors, errors
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 8))])
def test_threads_run_their_first_kernels_at_the_same_time(seed: int) -> None:
    code = FIRST_KERNELS.replace("SEED", str(seed)).replace("TESTS", repr(TESTS))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
