"""Numbers from the host to a device that goes on with what it is doing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def to_device(
    values: Sequence[Any] | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Numbers of the host on a device, which is not waited for.

    A copy from ordinary memory waits until the GPU has done all that was launched before. This one is from pinned
    memory, which PyTorch keeps until the copy is done; so ``values`` may change as soon as the call returns. What is
    on a device already is converted there.
    """
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        return values.to(device, dtype)
    pinned = device.type == "cuda"
    if not isinstance(values, torch.Tensor):
        return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=pinned).to(device, non_blocking=True)
    staged = torch.empty(values.shape, dtype=dtype, device="cpu", pin_memory=pinned).copy_(values)
    return staged.to(device, non_blocking=True)
