"""Gathers the cached tokens of a few requests from all ranks, in order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from flashlatte.distributed import collectives
from flashlatte.kv_cache.sharding import Sharding
from flashlatte.layers.cache import LatentCache
from flashlatte.ops.index_quantize import index_gather


@dataclass(frozen=True)
class GatheredRows:
    """``ShardedRows`` of a chunk: the rows that this rank sends, and the order of all gathered rows.

    Attributes:
        group: the ranks over which the keys are sharded.
        block_table: int [m, max_pages], this rank's pages of each request.
        starts: int32 [m], this rank's first token of each request to send.
        cu_rows: int32 [m + 1], offsets of each request's tokens among this rank's rows.
        rows_per_rank: number of rows that every rank sends, padding included.
        order: int64 [tokens], index of each token among the size · rows_per_rank gathered rows.
    """

    group: dist.ProcessGroup
    block_table: torch.Tensor
    starts: torch.Tensor
    cu_rows: torch.Tensor
    rows_per_rank: int
    order: torch.Tensor

    def latents(self, cache: LatentCache, dtype: torch.dtype) -> torch.Tensor:
        rows = self.rows_per_rank
        return self._gather(cache.gather(self.block_table, self.cu_rows, rows, dtype, seq_starts=self.starts))

    def index_keys(
        self, pages: torch.Tensor, head_dim: int, backend: str | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        options = {"head_dim": head_dim, "seq_starts": self.starts, "backend": backend}
        keys, scales = index_gather(pages, self.block_table, self.cu_rows, self.rows_per_rank, **options)
        return self._gather(keys), None if scales is None else self._gather(scales)

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        # Collectives and indexing do not support all float8 dtypes.
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
    """Plan to gather the tokens starts[i] to starts[i] + cu_tokens[i + 1] - cu_tokens[i] - 1 of m requests.

    It runs on the device without synchronization.

    Args:
        local_table: int [m, max_pages], this rank's pages of each request.
        starts: int32 [m].
        cu_tokens: int32 [m + 1], which ends with ``tokens``.
    """
    size, interleave, device = sharding.size, sharding.interleave, starts.device
    starts, cu_tokens = starts.long(), cu_tokens.long()
    ends = starts + cu_tokens.diff()
    shardings = [Sharding(index, size, interleave) for index in range(size)]
    first = torch.stack([each.local_lengths(starts) for each in shardings])  # [size, m], of the tokens on each rank
    counts = torch.stack([each.local_lengths(ends) for each in shardings]) - first
    cu_rows = torch.nn.functional.pad(counts.cumsum(1), (1, 0))
    # A rank has at most ⌈n / (size · interleave)⌉ · interleave of n consecutive tokens.
    requests = starts.shape[0]
    rows_per_rank = min(tokens, (tokens // (size * interleave) + requests) * interleave)

    token = torch.arange(tokens, device=device)
    request = torch.searchsorted(cu_tokens, token, right=True) - 1
    position = starts[request] + token - cu_tokens[request]
    owner = position // interleave % size
    local = position // (size * interleave) * interleave + position % interleave
    order = owner * rows_per_rank + cu_rows[owner, request] + local - first[owner, request]
    rank = sharding.rank
    return GatheredRows(group, local_table, first[rank].int(), cu_rows[rank].int(), rows_per_rank, order)
