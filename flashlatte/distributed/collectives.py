"""Collective operations, independent of PyTorch's version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def _by_name(name: str, old_name: str) -> Callable[..., Any]:
    """A function of torch.distributed; PyTorch 2.13 renamed two of them, and warns for the old name."""
    return getattr(dist, name, None) or getattr(dist, old_name)


_all_gather = _by_name("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _by_name("reduce_scatter_single", "reduce_scatter_tensor")


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate the ranks' tensors along the first axis: [n, …] → [size · n, …]."""
    gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    _all_gather(gathered, x.contiguous(), group=group)
    return gathered


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part, along the first axis, of the sum over ranks: [size · n, …] → [n, …]."""
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    _reduce_scatter(part, x.contiguous(), group=group)
    return part


def all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send part r of the first axis to rank r; part r of the result comes from rank r."""
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over ranks, in place."""
    dist.all_reduce(x, group=group)
    return x
