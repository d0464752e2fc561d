"""Packing of requests of unequal length into rows of equal length, and unpacking."""

from __future__ import annotations

import math

import torch

from flashlatte.ops.pack_seq import pack_seq, unpack_seq
from flashlatte.runtime import checks


def pack_seq_triton(
    x: torch.Tensor, lengths: torch.Tensor, pad_value: float = -math.inf, block_t: int = 64, block_d: int = 64
) -> torch.Tensor:
    """Pack concatenated requests into rows, padded to the longest request: ``flashlatte.pack_seq``.

    Reads the largest length from the device, which synchronizes, as vLLM does.

    Args:
        x: [T, …]; the values of a token are contiguous.
        lengths: int32 or int64 [b].
        pad_value: written after a request's tokens.
        block_t, block_d: unused.

    Returns:
        [b, longest, …].

    Raises:
        TypeError, ValueError: as ``pack_seq``.
    """
    boundaries = _boundaries(lengths)
    longest = int(lengths.max()) if lengths.numel() else 0
    return pack_seq(x, boundaries, longest, pad_value=pad_value)


def unpack_seq_triton(
    packed_tensor: torch.Tensor, lengths: torch.Tensor, block_t: int = 64, block_d: int = 64
) -> torch.Tensor:
    """The inverse of ``pack_seq_triton``, [T, …]: ``flashlatte.unpack_seq``. Reads T from the device."""
    boundaries = _boundaries(lengths)
    with checks.naming(packed="packed_tensor"):
        return unpack_seq(packed_tensor, boundaries, int(boundaries[-1]))


def _boundaries(lengths: torch.Tensor) -> torch.Tensor:
    checks.indices("lengths", lengths, ("b",), may_be_empty=1)
    return torch.nn.functional.pad(lengths.long().cumsum(0), (1, 0))
