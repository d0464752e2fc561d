"""Alignment of rows, byte views and block sizes for the launches of cache operations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashlatte.runtime.strides import stride_in_use

VECTOR_BYTES = 16
_ONE_BYTE = (torch.float8_e4m3fn, torch.int8)


@dataclass(frozen=True)
class Blocking:
    """Tokens and warps of a program. The kernels are memory-bound, so one choice is used for all GPUs."""

    tokens: int
    warps: int


def alignment_bytes(tensor: torch.Tensor, *strides: int) -> int:
    """Alignment of rows in bytes: the largest power of two, up to 16, that divides the address and the strides.

    ``strides`` are in elements. Launches pass strides divided by the alignment, which is a constexpr of the kernel: so
    the compiler knows the width of loads for any stride.
    """
    size = tensor.element_size()
    return math.gcd(VECTOR_BYTES, tensor.data_ptr(), *(stride * size for stride in strides))


def alignment_elements(tensor: torch.Tensor, *strides: int) -> int:
    """``alignment_bytes`` in elements of the tensor, at least 1: the divisor of the strides that launches pass."""
    return max(alignment_bytes(tensor, *strides) // tensor.element_size(), 1)


def row_alignment(tensor: torch.Tensor, *axes: int) -> int:
    """``alignment_elements`` for the strides of these axes."""
    return alignment_elements(tensor, *(stride_in_use(tensor, axis) for axis in axes))


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """View a one-byte cache as uint8: Triton refuses float8_e4m3fn pointers on GPUs without that conversion."""
    return cache.view(torch.uint8) if cache.dtype in _ONE_BYTE else cache


def cdiv(count: int, block: int) -> int:
    """⌈count / block⌉. ``triton.cdiv`` takes microseconds of host time."""
    return -(-count // block)
