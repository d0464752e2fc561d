"""The scale of a per-tensor quantized cache: a number, or a tensor that stays on its device."""

from __future__ import annotations

import torch

from flashlatte.runtime import checks


def check(name: str, value: float | torch.Tensor | None) -> float | torch.Tensor:
    """Check a scale: a positive normal float32 number or a one-element float32 tensor; None becomes 1."""
    if value is None:
        return 1.0
    if isinstance(value, torch.Tensor):
        checks.given(name, value)
        if value.dtype != torch.float32:
            raise TypeError(f"{name} must be a float or a float32 tensor, got {checks.dtype_names([value.dtype])}")
        if value.numel() != 1:
            raise ValueError(f"{name} must have one element, got shape {list(value.shape)}")
        return value.reshape(())
    return checks.float32_factor(name, value)


def split(name: str, value: float | torch.Tensor | None, device: torch.device) -> tuple[torch.Tensor | None, float]:
    """The scale as (tensor, 1.0) if it is a tensor, else as (None, number)."""
    value = check(name, value)
    if not isinstance(value, torch.Tensor):
        return None, value
    if value.device != device:
        raise ValueError(f"{name} must be on {device} like the cache, got {value.device}")
    return value, 1.0
