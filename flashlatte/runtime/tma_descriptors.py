"""TMA descriptors made on the host, of tensors of two-byte numbers."""

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
    """What a descriptor needs of a tensor. It holds no memory: a descriptor may outlive what it was made for."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def describe(
    base: torch.Tensor | Address, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int = 128
) -> Any:
    """Of boxes whose rows are swizzled in shared memory by ``swizzle`` bytes, or all of a row that is narrower.

    Args:
        strides: of all axes but the last, in numbers; 0 for an axis of one entry (``strides.strides_in_use``).
        box: numbers of a box along each axis.
    """
    # An axis of 1 has no stride that matters, but the hardware wants one above 0.
    wide = [stride or shape[-1] for stride in strides]
    return TensorDescriptor(base, list(shape), [*wide, 1], list(box), _layout(len(shape), min(2 * box[-1], swizzle)))


@functools.cache
def _layout(rank: int, swizzle: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=rank)
