"""Strides as kernels receive them: 0 for an axis of size 1, whose stride in PyTorch is arbitrary."""

from __future__ import annotations

import torch


def first_stride(tensor: torch.Tensor | None) -> int:
    """The stride of the first axis; 0 for None."""
    return 0 if tensor is None else tensor.stride(0)


def stride_in_use(tensor: torch.Tensor, axis: int) -> int:
    """The stride of an axis, or 0 if its size is 1."""
    return tensor.stride(axis) if tensor.shape[axis] > 1 else 0


def strides_in_use(tensor: torch.Tensor) -> tuple[int, ...]:
    """``stride_in_use`` for all axes except the last."""
    strides, sizes = tensor.stride(), tensor.shape
    return tuple([strides[axis] if sizes[axis] > 1 else 0 for axis in range(len(sizes) - 1)])


def row_align(tensor: torch.Tensor, elements: int = 8) -> int:
    """``elements`` if every row begins at a multiple of that many elements, else 1. The default: 16 bytes of bf16.

    Kernels take strides divided by this number, as a compile-time constant. The compiler can then use 16-byte loads and
    stores without a variant for each stride.
    """
    begins = tensor.data_ptr() % (elements * tensor.element_size()) == 0
    return elements if begins and all(stride % elements == 0 for stride in strides_in_use(tensor)) else 1
