"""The plan of a decode step on one rank: its pages, and the number of its keys that each query attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte.kv_cache.registry import as_format
from flashlatte.kv_cache.sharding import Sharding
from flashlatte.ops.index_convert import to_cache_indices
from flashlatte.runtime import checks


@dataclass(frozen=True)
class ShardPlan:
    """One rank's view of a step of b requests with ``queries`` new tokens each. All tensors are on the device.

    Attributes:
        sharding: the keys that the rank stores.
        requests, queries: number of requests b, and of new tokens of each.
        page_size: tokens in a page of the rank's cache.
        block_table: int [b, max_pages], the rank's pages.
        query_lens: int [b, queries], number of the rank's keys that each query attends to.
        row_queries: queries in a row of attention: all of a request, or one if their numbers of keys differ.
        rows_table: int [rows, max_pages], ``block_table`` for each row.
        row_lens: int [rows], number of the rank's keys that each row attends to.
        slots: int32 [b, queries, max_pages · page_size], all slots of each request, for formats read by
            ``sparse_decode``; None for others.
    """

    sharding: Sharding
    requests: int
    queries: int
    page_size: int
    block_table: torch.Tensor
    query_lens: torch.Tensor
    row_queries: int
    rows_table: torch.Tensor
    row_lens: torch.Tensor
    slots: torch.Tensor | None


def plan_shard(
    sharding: Sharding,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    page_tokens: int,
    page_size: int | None = None,
    queries: int = 1,
    causal: bool = True,
    cache_format: str | None = None,
) -> ShardPlan:
    """Plan a step for one rank from the global block table and lengths; arguments as for ``ContextParallel.plan``.

    A rank stores ``sharding.local_lengths(n)`` of the keys 0 to n - 1. From one causal query to the next this number
    grows only if the new key is on the rank. Therefore each causal query is a row of attention with its own length.
    """
    checks.tensor("block_table", block_table, ("b", "max_pages"), checks.INDEX_DTYPES, may_be_empty=1)
    batch, device = block_table.shape[0], block_table.device
    checks.indices("cache_seqlens", cache_seqlens, (batch,), device)
    checks.positive_int("queries", queries)
    checks.flag("causal", causal)
    page_size = page_tokens // sharding.size if page_size is None else page_size
    table = sharding.local_block_table(block_table, page_tokens, page_size)

    visible = cache_seqlens.unsqueeze(1).expand(-1, queries)
    if causal:
        # Clamp before subtracting, which would overflow for the smallest int32.
        visible = visible.clamp_min(0) - torch.arange(queries - 1, -1, -1, dtype=visible.dtype, device=device)
    query_lens = sharding.local_lengths(visible)
    if causal and queries > 1:
        row_queries, row_lens = 1, query_lens.flatten()
        rows_table = table.repeat_interleave(queries, 0, output_size=batch * queries)
    else:
        row_queries, row_lens, rows_table = queries, query_lens[:, 0], table
    slots = None
    if cache_format is not None and not as_format(cache_format).plain:
        slot_positions = torch.arange(table.shape[1] * page_size, device=device).expand(batch, -1)
        slots = to_cache_indices(slot_positions, table, page_size).unsqueeze(1).expand(-1, queries, -1)
    return ShardPlan(sharding, batch, queries, page_size, table, query_lens, row_queries, rows_table, row_lens, slots)
