"""The collectives in use, by whichever of their names PyTorch has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def _named(name: str, before: str) -> Callable[..., Any]:
    """PyTorch 2.13 renamed two of them, and warns at every call by the old name."""
    return getattr(dist, name, None) or getattr(dist, before)


_all_gather = _named("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What each rank has, one after the other along the first axis: [n, …] → [size · n, …]."""
    gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    _all_gather(gathered, x.contiguous(), group=group)
    return gathered


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of the sum, along the first axis: [size · n, …] → [n, …]."""
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    _reduce_scatter(part, x.contiguous(), group=group)
    return part


def all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Part r of the first axis goes to rank r; what comes from rank r is part r of the result."""
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum, in place."""
    dist.all_reduce(x, group=group)
    return x
