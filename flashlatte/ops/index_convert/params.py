"""The arguments of an implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class IndexConvertParams(NamedTuple):
    """The checked arguments of ``api.index_convert``: ``sharding`` has the fields of a ``Sharding``; ``counts`` is None
    if they are not returned."""

    indices: torch.Tensor | None
    block_table: torch.Tensor
    page_size: int
    request_ids: torch.Tensor | None
    next_n: int
    query_positions: torch.Tensor | None
    sinks: int
    window: int
    workspace_ids: torch.Tensor | None
    workspace_starts: torch.Tensor | None
    sharding: Sequence[int]
    compact: bool
    slots: torch.Tensor
    counts: torch.Tensor | None
