"""How the launches of cache operations address a cache's bytes and divide the work."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashlatte.runtime.strides import stride_in_use

VECTOR_BYTES = 16
_ONE_BYTE = (torch.float8_e4m3fn, torch.int8)


@dataclass(frozen=True)
class Blocking:
    """Tokens and warps of a program. The work is bound by memory, and one choice serves every GPU."""

    tokens: int
    warps: int


def unit_bytes(tensor: torch.Tensor, *strides: int) -> int:
    """The alignment of rows in bytes: the largest power of two, up to 16, that divides the address and these strides.

    Strides are given in elements, and launches pass them in units of this. A kernel is compiled for the unit, and so
    knows how wide a load may be, whatever the stride.
    """
    size = tensor.element_size()
    return math.gcd(VECTOR_BYTES, tensor.data_ptr(), *(stride * size for stride in strides))


def unit_elements(tensor: torch.Tensor, *strides: int) -> int:
    """``unit_bytes`` in elements of the tensor: the unit in which its strides are passed."""
    return max(unit_bytes(tensor, *strides) // tensor.element_size(), 1)


def unit_of_rows(tensor: torch.Tensor, *axes: int) -> int:
    """``unit_elements`` of rows that lie along these axes, by their strides."""
    return unit_elements(tensor, *(stride_in_use(tensor, axis) for axis in axes))


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """A one-byte cache as uint8: Triton refuses float8_e4m3fn pointers on GPUs that cannot convert it."""
    return cache.view(torch.uint8) if cache.dtype in _ONE_BYTE else cache


def blocks(count: int, block: int) -> int:
    """⌈count / block⌉. ``triton.cdiv`` takes microseconds of the host's time."""
    return -(-count // block)
