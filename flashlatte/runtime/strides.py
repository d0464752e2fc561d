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


def row_align(tensor: torch.Tensor, numbers: int = 8) -> int:
    """``numbers`` (of two bytes each, 16 bytes) if every row begins at a multiple of so many, else 1.

    Strides are passed in this unit, for which the kernel is compiled: so the compiler knows that loads and stores of 16
    bytes may be used, without a variant for each stride.
    """
    begins = tensor.data_ptr() % (numbers * tensor.element_size()) == 0
    return numbers if begins and all(stride % numbers == 0 for stride in strides_in_use(tensor)) else 1
