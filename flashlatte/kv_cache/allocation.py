"""Allocation of cache memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def zeros(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | None, num_pages: int, page_size: int, name: str
) -> torch.Tensor:
    """``torch.zeros`` for a cache in format ``name``.

    Raises:
        torch.OutOfMemoryError: the device has too little memory; the message gives pages and GiB.
    """
    try:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    except RuntimeError as error:
        # The CPU's allocator raises a plain RuntimeError; on a GPU a plain RuntimeError may be another error.
        on_cpu = (device or torch.get_default_device()).type == "cpu"
        if not on_cpu and not isinstance(error, torch.OutOfMemoryError):
            raise
        gib = math.prod(shape) * dtype.itemsize / 2**30
        raise torch.OutOfMemoryError(
            f"num_pages must make a cache that fits the device's memory, got {num_pages:,} pages of {page_size:,} "
            f"tokens in format {name}, which take {gib:,.1f} GiB ({error})"
        ) from error
