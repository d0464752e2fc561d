"""Slots of the tokens in a sliding window, for layers that attend to them only."""

from __future__ import annotations

import torch

from flashlatte.ops.index_convert import to_cache_indices


def window_slots(
    positions: torch.Tensor, request_ids: torch.Tensor, block_table: torch.Tensor, page_size: int, width: int
) -> torch.Tensor:
    """Slots of the tokens at positions p - width + 1 to p of each token's request, int32 [T, width].

    -1 before the first token.

    Args:
        positions: int64 [T], position p of each token in its request.
        request_ids: int [T], the row of each token's request in ``block_table``; -1 for a token without a request.
        block_table: int32 [n, max_pages].
    """
    back = torch.arange(width - 1, -1, -1, device=positions.device)
    return to_cache_indices(positions[:, None] - back, block_table, page_size, request_ids=request_ids)


def request_ids(query_lens: list[int]) -> torch.Tensor:
    """The request of each token of a flat batch, int64 [tokens] on the CPU."""
    requests = torch.arange(len(query_lens), device="cpu")
    return torch.repeat_interleave(requests, torch.tensor(query_lens, dtype=torch.int64, device="cpu"))
