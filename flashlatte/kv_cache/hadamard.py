"""Sylvester's Hadamard matrix, which spreads the outliers of a row over all of its elements."""

from __future__ import annotations

import functools

import torch


@functools.lru_cache(maxsize=32)
def hadamard(dim: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``signs`` times dim^-0.5: orthonormal, symmetric, its own inverse. Cached: callers must not modify it."""
    # An inference tensor could not be used outside inference mode.
    with torch.inference_mode(False):
        return (signs(dim) * dim**-0.5).to(device, dtype)


def signs(dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 [dim, dim] of ±1: row i, column j is (-1)^popcount(i & j). ``dim`` is a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while matrix.shape[0] < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1)))
    return matrix
