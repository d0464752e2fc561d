"""Block tables of a batch of requests that grow, share full pages and shrink."""

from __future__ import annotations

import torch

from flashlatte.ops.index_convert import to_cache_indices


class PageTable:
    """Allocates page indices for a batch of requests; cache tensors of several layers use the same indices.

    Attributes:
        page_size: tokens in a page.
        block_table: int32 [b, pages], the pages of each request in order; those beyond its length are reserved.
        lengths: int32 [b], tokens of each request.
        num_pages: minimum number of pages of a cache tensor.
    """

    def __init__(self, requests: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.block_table = torch.zeros(requests, 0, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(requests, dtype=torch.int32, device=device)
        self.num_pages = 0
        self._shared = False

    @property
    def requests(self) -> int:
        return self.block_table.shape[0]

    @property
    def device(self) -> torch.device:
        return self.block_table.device

    def reserve(self, tokens: int) -> None:
        """Reserve pages for ``tokens`` tokens of every request, and a quarter more, so that growth is rare."""
        pages, before = -(-tokens // self.page_size), self.block_table.shape[1]
        if pages <= before:
            return
        pages += pages // 4
        grown = torch.nn.functional.pad(self.block_table, (0, pages - before))
        kept = torch.arange(pages, device=self.device) < before
        self.block_table = self._allocate_pages(grown, kept.expand(self.requests, -1))

    def slots(self, positions: torch.Tensor, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Slots of token positions [b, n] within their requests; a negative position gives −1."""
        return to_cache_indices(positions, self.block_table, self.page_size, dtype=dtype)

    def select(self, requests: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Replace the batch by requests of it, given by index (int [n], repeats allowed).

        Full pages are shared, since they are not written any more; a partially filled page is copied.

        Returns:
            Source and destination pages, int [m] each, which the caller must copy in every cache tensor. All sources
            must be read before a destination is written.
        """
        table, lengths = self.block_table[requests], self.lengths[requests]
        filling = (lengths // self.page_size).long()
        logical = torch.arange(table.shape[1], device=self.device)
        own = self._allocate_pages(table, logical < filling[:, None])
        partial = (lengths % self.page_size > 0).nonzero().flatten()
        column = filling[partial]
        self.block_table, self.lengths, self._shared = own, lengths, True
        return table[partial, column], own[partial, column]

    def shorten(self, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Truncate the requests to ``lengths`` (int32 [b]); returns pages to copy, as ``select`` does."""
        self.lengths = lengths
        if self._shared:
            return self.select(torch.arange(self.requests, device=self.device))
        no_pages = self.block_table.new_empty(0)
        return no_pages, no_pages

    def _allocate_pages(self, table: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """``table`` with a fresh page in every entry that is not ``kept``: unused pages first, then new ones."""
        used = torch.zeros(self.num_pages, dtype=torch.bool, device=self.device)
        used[table[kept].long()] = True
        free = (~used).nonzero().flatten()
        needed = int((~kept).sum())
        missing = max(0, needed - free.numel())
        new = torch.arange(self.num_pages, self.num_pages + missing, device=self.device)
        self.num_pages += missing
        table = table.clone()
        table[~kept] = torch.cat((free, new))[:needed].to(table.dtype)
        return table
