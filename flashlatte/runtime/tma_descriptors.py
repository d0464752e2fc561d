"""TMA descriptors, created on the host, of tensors with two-byte elements."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@dataclass(frozen=True)
class Address:
    """Replaces a descriptor's tensor, so that the descriptor does not keep the tensor's memory alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def describe(
    base: torch.Tensor | Address, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int = 128
) -> Any:
    """A descriptor of boxes with a swizzle of ``swizzle`` bytes in shared memory, or of a box's row if that is shorter.

    Args:
        strides: strides of all axes except the last, in elements; 0 for an axis of size 1 (``strides.strides_in_use``).
        box: elements of a box along each axis.
    """
    # The hardware requires strides above 0, also for an axis of size 1.
    positive = [stride or shape[-1] for stride in strides]
    return TensorDescriptor(
        base, list(shape), [*positive, 1], list(box), _layout(len(shape), min(2 * box[-1], swizzle))
    )


def check_rows(name: str, address: int, strides: Sequence[int], itemsize: int = 2) -> None:
    """Check that rows begin at multiples of 16 bytes, as TMA requires.

    Under torch.compile, operations cannot check addresses (``checks.begins_at_multiple``), so launches do.

    Args:
        strides: strides of all axes except the last, in elements of ``itemsize`` bytes.

    Raises:
        ValueError: a row begins elsewhere.
    """
    if address % 16 or any(stride * itemsize % 16 for stride in strides):
        raise ValueError(
            f"{name} must have rows that begin at multiples of 16 bytes for backend='hopper', "
            f"got address {address:#x}, strides {(*strides, 1)}"
        )


@functools.lru_cache(maxsize=2048)
def describe_rows(
    name: str, address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> Any:
    """``describe`` for memory at an address, after ``check_rows``. Cached: building a descriptor takes microseconds."""
    check_rows(name, address, strides)
    return describe(Address(address, dtype), shape, strides, box)


@functools.cache
def _layout(rank: int, swizzle: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=rank)
