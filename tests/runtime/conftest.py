"""The fake compiled kernel shared by tests of repeated launches."""

from __future__ import annotations

import pytest
import torch
from support.repeated_kernel import STREAM, Add

from flashlatte.runtime import repeat


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Add:
    compiled = Add()
    repeat.forget()
    monkeypatch.setattr(repeat, "_DEVICE_TYPE", "cpu")
    monkeypatch.setattr(repeat, "_FIRST_DEVICE", -1)
    monkeypatch.setattr(repeat, "_current_device", lambda: None)
    monkeypatch.setattr(repeat, "_current_stream", lambda device: STREAM)

    def allocate(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty_strided(shape, stride, dtype=dtype)
        compiled.known(tensor)
        return tensor

    monkeypatch.setattr(repeat, "_allocate", allocate)
    return compiled
