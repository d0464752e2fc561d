"""Checks of what index tensors hold. They run where the environment variable FLASHLATTE_CHECK is set to 1.

Kernels treat a page, slot, index or length that does not exist as absent, which hides the error of a page manager.
These checks read the values back and raise instead. Each of them waits for the device. A call inside torch.compile, on
fake tensors, or during the capture of a CUDA graph is not checked: its values are not known.
"""

from __future__ import annotations

import os

import torch

from flashlatte.runtime.checks import has_memory

ENABLED = os.environ.get("FLASHLATTE_CHECK", "0") not in ("", "0")


def entries(name: str, values: torch.Tensor, bound: int, used: torch.Tensor | None = None) -> None:
    """Check that entries lie between 0 and ``bound`` - 1, or are -1, which stands for none.

    ``used`` is a mask of the entries that the operation reads; all of them if None.
    """
    if readable(values):
        _refuse(name, values, values.long(), -1, bound - 1, used, ", or -1 for none")


def lengths(name: str, values: torch.Tensor, most: int) -> None:
    """Check that lengths lie between 0 and ``most``."""
    if readable(values):
        _refuse(name, values, values.long(), 0, most)


def selections(name: str, indices: torch.Tensor, length_name: str, topk_length: torch.Tensor, bound: int) -> None:
    """Check indices [..., topk], of which the first ``topk_length`` count: [b], or a number for each row of them."""
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
    """Check the lengths ``ends`` [b] of requests against a block table, and the pages of tokens ``starts`` to ``ends``.

    Args:
        block_table: [b, max_pages]; other entries of it may hold anything.
        num_pages, page_size: of the cache.
        name: the argument that an error about ``ends`` names.
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
    least: int,
    most: int,
    used: torch.Tensor | None = None,
    exception: str = "",
) -> None:
    wrong = (as_int64 < least) | (as_int64 > most)
    if used is not None:
        wrong &= used
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        got = int(values[tuple(place)])
        raise ValueError(f"{name} must hold numbers from 0 to {most}{exception}, got {got} at {place}")
