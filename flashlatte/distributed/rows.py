"""Cached tokens of a few requests, whole again on every rank: each sends what it has, and all are put into order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from flashlatte.distributed import collectives
from flashlatte.kv_cache.sharding import Sharding
from flashlatte.layers.cache import LatentCache
from flashlatte.ops.cache_gather import cache_gather
from flashlatte.ops.index_quantize import index_gather


@dataclass(frozen=True)
class GatheredRows:
    """Which rows a rank sends, and where every token is among those of all; ``RowsOverRanks`` of a chunk.

    Attributes:
        group: the ranks that the keys are divided over.
        block_table: int [m, max_pages], this rank's pages of each request.
        starts: int32 [m], this rank's first token of each request that it sends.
        cu_rows: int32 [m + 1], where each request's tokens begin among its rows.
        room: rows that every rank sends, used or not.
        order: int64 [tokens], of each token its row among the size · room gathered ones.
    """

    group: dist.ProcessGroup
    block_table: torch.Tensor
    starts: torch.Tensor
    cu_rows: torch.Tensor
    room: int
    order: torch.Tensor

    def latents(self, cache: LatentCache, dtype: torch.dtype) -> torch.Tensor:
        mine = cache_gather(
            cache.pages,
            self.block_table,
            self.cu_rows,
            cache_format=cache.layout,
            scale=cache.scale,
            seq_starts=self.starts,
            total_tokens=self.room,
            dtype=dtype,
        )
        return self._whole(mine)

    def index_keys(
        self, pages: torch.Tensor, head_dim: int, backend: str | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        keys, scales = index_gather(
            pages,
            self.block_table,
            self.cu_rows,
            self.room,
            head_dim=head_dim,
            seq_starts=self.starts,
            backend=backend,
        )
        return self._whole(keys), None if scales is None else self._whole(scales)

    def _whole(self, mine: torch.Tensor) -> torch.Tensor:
        # Collectives and indexing do not know all float8 types.
        stored = mine.view(torch.uint8) if mine.dtype.itemsize == 1 else mine
        return collectives.all_gather(stored, self.group)[self.order].view(mine.dtype)


def plan_rows(
    sharding: Sharding,
    group: dist.ProcessGroup,
    local_table: torch.Tensor,
    starts: torch.Tensor,
    cu_tokens: torch.Tensor,
    tokens: int,
) -> GatheredRows:
    """Plan to gather, of m requests, the tokens starts[i] to starts[i] + cu_tokens[i + 1] - cu_tokens[i] - 1.

    It runs on the device of its tensors and waits for nothing.

    Args:
        local_table: int [m, max_pages], this rank's pages of each request.
        starts: int32 [m]. cu_tokens: int32 [m + 1], which ends with ``tokens``.
    """
    size, interleave, device = sharding.size, sharding.interleave, starts.device
    starts, cu_tokens = starts.long(), cu_tokens.long()
    ends = starts + cu_tokens.diff()
    ranks = [Sharding(rank, size, interleave) for rank in range(size)]
    first = torch.stack([rank.local_lengths(starts) for rank in ranks])  # [size, m], of the tokens on each rank
    held = torch.stack([rank.local_lengths(ends) for rank in ranks]) - first
    cu_rows = torch.nn.functional.pad(held.cumsum(1), (1, 0))
    # Of n tokens in a row a rank has at most ⌈n / (size · interleave)⌉ · interleave.
    requests = starts.shape[0]
    room = min(tokens, (tokens // (size * interleave) + requests) * interleave)

    token = torch.arange(tokens, device=device)
    request = torch.searchsorted(cu_tokens, token, right=True) - 1
    position = starts[request] + token - cu_tokens[request]
    owner = position // interleave % size
    local = position // (size * interleave) * interleave + position % interleave
    order = owner * room + cu_rows[owner, request] + local - first[owner, request]
    mine = sharding.rank
    return GatheredRows(group, local_table, first[mine].int(), cu_rows[mine].int(), room, order)
