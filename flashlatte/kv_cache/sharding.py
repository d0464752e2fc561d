"""Which tokens of a request lie on a rank of a context-parallel group, and where: the conventions of vLLM's DCP."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.runtime import checks


class Sharding(NamedTuple):
    """Token t lies on rank (t // interleave) % size, there as token (t // (size · interleave)) · interleave +
    t % interleave.

    A page of the sharded cache, which is one number on all ranks, holds ``page_tokens`` tokens of a request, and of
    these each rank holds page_tokens / size. So the ranks share one block table, and one that a page manager made
    for pages of ``page_tokens`` tokens serves all of them. Everything here runs on the device of its tensors and waits
    for nothing.
    """

    rank: int = 0
    size: int = 1
    interleave: int = 1

    def owns(self, positions: torch.Tensor) -> torch.Tensor:
        """Whether this rank holds each token of a request; false below 0."""
        return (positions >= 0) & (positions // self.interleave % self.size == self.rank)

    def local_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Tokens of a request as numbered on this rank; -1 for those of other ranks, and below 0."""
        turn = self.size * self.interleave
        local = positions // turn * self.interleave + positions % self.interleave
        return torch.where(self.owns(positions), local, -1)

    def global_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Tokens as numbered on this rank as tokens of the request; -1 below 0."""
        turn = self.size * self.interleave
        first = positions // self.interleave * turn + self.rank * self.interleave
        return torch.where(positions >= 0, first + positions % self.interleave, -1)

    def local_lengths(self, lengths: torch.Tensor) -> torch.Tensor:
        """How many of a request's first ``lengths`` tokens this rank holds; 0 below 0."""
        lengths = lengths.clamp_min(0)
        turn = self.size * self.interleave
        rest = lengths % turn - self.rank * self.interleave
        return lengths // turn * self.interleave + rest.clamp(0, self.interleave)

    def local_slots(self, slots: torch.Tensor, page_tokens: int) -> torch.Tensor:
        """Slots of a cache with pages of ``page_tokens`` tokens as this rank's; -1 for other ranks', and below 0.

        Args:
            slots: int32 or int64, any shape: page · page_tokens + offset.
            page_tokens: a multiple of size · interleave.

        Returns:
            The same shape and dtype: page · (page_tokens / size) + the token's place among this rank's of the page.

        Raises:
            ValueError: pages in which the ranks' tokens would not be those of the request's.
        """
        self._check_page(page_tokens)
        page, offset = slots // page_tokens, slots % page_tokens
        local = self.local_positions(offset)
        return torch.where((slots >= 0) & (local >= 0), page * (page_tokens // self.size) + local, -1)

    def local_block_table(self, block_table: torch.Tensor, page_tokens: int, page_size: int) -> torch.Tensor:
        """A table of pages of ``page_tokens`` tokens as one of this rank's pages of ``page_size``.

        Args:
            block_table: int32 or int64 [b, max_pages].
            page_tokens: a multiple of size · interleave.
            page_size: tokens in a page as this rank's kernels see its cache; divides page_tokens / size.

        Returns:
            [b, max_pages · n], a page of the table being n = page_tokens / size / page_size pages in a row; -1 for
            pages below 0, and for those whose numbers here the dtype does not hold. With n = 1, which needs nothing
            done, the table itself.

        Raises:
            ValueError: pages that do not divide so.
        """
        self._check_page(page_tokens)
        held = page_tokens // self.size
        if held % checks.positive_int("page_size", page_size):
            raise ValueError(
                f"page_size must divide the {held} tokens that a rank holds of a page of {page_tokens}, got {page_size}"
            )
        count = held // page_size
        if count == 1:
            return block_table
        inside = torch.arange(count, dtype=block_table.dtype, device=block_table.device)
        pages = block_table.unsqueeze(-1)
        # What stands behind a request's last page may be anything, and must not wrap into a page that exists.
        fits = (pages >= 0) & (pages < (torch.iinfo(block_table.dtype).max + 1) // count)
        return torch.where(fits, pages * count + inside, -1).flatten(1)

    def _check_page(self, page_tokens: int) -> None:
        turn = self.size * self.interleave
        if checks.positive_int("page_tokens", page_tokens) % turn:
            raise ValueError(
                f"page_tokens must be a multiple of the {turn} tokens after which {self.size} ranks with interleave "
                f"{self.interleave} begin again, got {page_tokens}"
            )


def as_sharding(sharding: tuple[int, int, int]) -> Sharding:
    """A checked (rank, size, interleave)."""
    if not isinstance(sharding, tuple) or len(sharding) != 3:
        raise TypeError(f"sharding must be (rank, size, interleave), got {sharding!r}")
    rank, size, interleave = sharding
    checks.positive_int("sharding's rank", rank, or_zero=True)
    checks.positive_int("sharding's size", size)
    checks.positive_int("sharding's interleave", interleave)
    if rank >= size:
        raise ValueError(f"sharding's rank must be below its size {size}, got {rank}")
    return Sharding(rank, size, interleave)
