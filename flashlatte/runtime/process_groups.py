"""Process groups of torch.distributed in operations: PyTorch's schemas have no groups, so operations take their names.

The collective is that of PyTorch's own compiled programs (``torch.ops._c10d_functional``, in PyTorch since 2.2), which
finds a group by its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import torch.distributed as dist


def group_name(group: dist.ProcessGroup | None) -> str | None:
    """The name of a group; None for None. Raise TypeError for another object, such as a group without this rank."""
    if group is None:
        return None
    name = getattr(group, "group_name", None)
    if not isinstance(name, str):
        raise TypeError(f"group must be a process group that this rank is in, or None, got {group!r}")
    return name


def sum_over_ranks(x: torch.Tensor, name: str) -> None:
    """Replace a contiguous tensor by its sum over the ranks of a group. Every rank of the group makes the same call."""
    functional = torch.ops._c10d_functional
    functional.wait_tensor(functional.all_reduce_(x, "sum", name))
