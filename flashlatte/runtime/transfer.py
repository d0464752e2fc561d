"""Asynchronous copies of host values to a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def to_device(
    values: Sequence[Any] | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copy host values to a device without synchronizing.

    A copy from pageable memory waits for all earlier work of the GPU. This one goes through pinned memory, which
    PyTorch keeps until the copy is complete, so ``values`` may be changed after the call. A tensor that is already on a
    device is converted there.
    """
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        return values.to(device, dtype)
    pinned = device.type == "cuda"
    if not isinstance(values, torch.Tensor):
        return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=pinned).to(device, non_blocking=True)
    staged = torch.empty(values.shape, dtype=dtype, device="cpu", pin_memory=pinned).copy_(values)
    return staged.to(device, non_blocking=True)
