"""Records what ``torch.empty`` allocates."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def recorded_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each tensor that ``torch.empty`` makes until the end of the test."""
    empty, sizes = torch.empty, list[int]()

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", recorded)
    return sizes
