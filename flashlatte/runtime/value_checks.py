"""Checks of the values of index tensors, enabled by the environment variable FLASHLATTE_CHECK=1.

Kernels treat a page, slot, index or length that is out of range as absent, which can hide an error of a page manager.
These checks read the values and raise an error; each synchronizes with the device. A call inside torch.compile, on
fake tensors, or during CUDA-graph capture is not checked, because the values are not available.
"""

from __future__ import annotations

import os

import torch

from flashlatte.runtime.checks import has_memory

ENABLED = os.environ.get("FLASHLATTE_CHECK", "0") not in ("", "0")


def entries(name: str, values: torch.Tensor, bound: int, used: torch.Tensor | None = None) -> None:
    """Check that entries are between 0 and ``bound`` - 1, or -1 for none.

    ``used`` is a mask of the entries that the operation reads; None means all.
    """
    if readable(values):
        _refuse(name, values, values.long(), -1, bound - 1, used, ", or -1 for none")


def lengths(name: str, values: torch.Tensor, maximum: int) -> None:
    """Check that lengths are between 0 and ``maximum``."""
    if readable(values):
        _refuse(name, values, values.long(), 0, maximum)


def selections(name: str, indices: torch.Tensor, length_name: str, topk_length: torch.Tensor, bound: int) -> None:
    """Check the first ``topk_length`` of indices [..., topk]; topk_length is [b], or has an entry for each row."""
    topk = indices.shape[-1]
    lengths(length_name, topk_length, topk)
    if ENABLED:
        counted = topk_length.reshape(*topk_length.shape, *[1] * (indices.dim() - topk_length.dim()))
        entries(name, indices, bound, torch.arange(topk, device=indices.device) < counted)


def pages(
    block_table: torch.Tensor,
    ends: torch.Tensor,
    num_pages: int,
    page_size: int,
    *,
    name: str = "cache_seqlens",
    starts: torch.Tensor | None = None,
) -> None:
    """Check that lengths ``ends`` [b] fit a block table, and that the pages of tokens ``starts`` to ``ends`` exist.

    Args:
        block_table: [b, max_pages]; only the entries of these pages are checked.
        num_pages, page_size: number and size of the cache's pages.
        name: the argument's name in an error about ``ends``.
        starts: [b], the first token of each request that the operation reads; 0 if None.
    """
    if not readable(block_table):
        return
    ends = ends.long()
    _refuse(name, ends, ends, 0, block_table.shape[1] * page_size)
    column = torch.arange(block_table.shape[1], device=block_table.device)
    used = column < -(-ends // page_size)[:, None]
    if starts is not None:
        used &= column >= (starts.long() // page_size)[:, None]
    entries("block_table", block_table, num_pages, used)


def readable(values: torch.Tensor) -> bool:
    return (
        ENABLED
        and not torch.compiler.is_compiling()
        and has_memory(values)
        and not (values.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _refuse(
    name: str,
    values: torch.Tensor,
    as_int64: torch.Tensor,
    minimum: int,
    maximum: int,
    used: torch.Tensor | None = None,
    exception: str = "",
) -> None:
    wrong = (as_int64 < minimum) | (as_int64 > maximum)
    if used is not None:
        wrong &= used
    if wrong.any():
        position = wrong.nonzero()[0].tolist()
        got = int(values[tuple(position)])
        raise ValueError(f"{name} must hold values from 0 to {maximum}{exception}, got {got} at {position}")
