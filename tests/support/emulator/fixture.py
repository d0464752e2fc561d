"""The fixture of tests that run compiled Hopper kernels in the emulator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A function that starts the emulation of a GPU, with the options of ``Emulation``. Fresh tensors hold NaN."""
    # Processes that only hand out tests need neither PyTorch nor the package.
    import torch
    from support.emulator.emulated import Emulation

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(Emulation(monkeypatch, **options).running())
    torch.use_deterministic_algorithms(before)
