"""Strides as launches hand them to kernels: of an axis with one entry they say nothing, and PyTorch's are arbitrary."""

from __future__ import annotations

import torch


def stride_in_use(tensor: torch.Tensor, axis: int) -> int:
    """The stride, or 0 where the axis has one entry and its stride says nothing."""
    return tensor.stride(axis) if tensor.shape[axis] > 1 else 0


def strides_in_use(tensor: torch.Tensor) -> tuple[int, ...]:
    """``stride_in_use`` of all axes but the last."""
    strides, sizes = tensor.stride(), tensor.shape
    return tuple([strides[axis] if sizes[axis] > 1 else 0 for axis in range(len(sizes) - 1)])
