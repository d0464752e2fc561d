"""Helpers of the tests of SGLang's replaced functions."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def untouched(*args: Any, **kwargs: Any) -> NoReturn:
    """Replacement for SGLang's own function, which must not be called."""
    raise AssertionError("SGLang's own function was called")
