"""The sharding of a request's tokens over the ranks of a context-parallel group, by the convention of vLLM's DCP."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.runtime import checks


class Sharding(NamedTuple):
    """Token t is on rank (t // interleave) % size, at local position (t // (size · interleave)) · interleave +
    t % interleave.

    A page of the sharded cache has the same page number on all ranks. It holds ``page_tokens`` tokens of a request, and
    each rank holds page_tokens / size of them. All ranks therefore use the same block table, which a page manager makes
    for pages of ``page_tokens`` tokens. The methods run on the device of their tensors and do not synchronize.
    """

    rank: int = 0
    size: int = 1
    interleave: int = 1

    def owns(self, positions: torch.Tensor) -> torch.Tensor:
        """Whether this rank holds the token at each position of a request; False for positions below 0."""
        return (positions >= 0) & (positions // self.interleave % self.size == self.rank)

    def local_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Local positions of a request's tokens on this rank; -1 for tokens of other ranks and positions below 0."""
        period = self.size * self.interleave
        local = positions // period * self.interleave + positions % self.interleave
        return torch.where(self.owns(positions), local, -1)

    def global_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """The request's positions of tokens at local positions on this rank; -1 for positions below 0."""
        period = self.size * self.interleave
        first = positions // self.interleave * period + self.rank * self.interleave
        return torch.where(positions >= 0, first + positions % self.interleave, -1)

    def local_lengths(self, lengths: torch.Tensor) -> torch.Tensor:
        """How many of a request's first ``lengths`` tokens this rank holds; 0 for lengths below 0."""
        lengths = lengths.clamp_min(0)
        period = self.size * self.interleave
        rest = lengths % period - self.rank * self.interleave
        return lengths // period * self.interleave + rest.clamp(0, self.interleave)

    def local_slots(self, slots: torch.Tensor, page_tokens: int) -> torch.Tensor:
        """This rank's slots for slots of the sharded cache; -1 for slots of other ranks and below 0.

        Args:
            slots: int32 or int64, any shape: page · page_tokens + offset.
            page_tokens: a multiple of size · interleave.

        Returns:
            The same shape and dtype: page · (page_tokens / size) + the token's local position in the page.

        Raises:
            ValueError: page_tokens is not a multiple of size · interleave.
        """
        self._check_page(page_tokens)
        page, offset = slots // page_tokens, slots % page_tokens
        local = self.local_positions(offset)
        return torch.where((slots >= 0) & (local >= 0), page * (page_tokens // self.size) + local, -1)

    def local_block_table(self, block_table: torch.Tensor, page_tokens: int, page_size: int) -> torch.Tensor:
        """Convert a table of sharded pages of ``page_tokens`` tokens to a table of this rank's pages of ``page_size``.

        Args:
            block_table: int32 or int64 [b, max_pages].
            page_tokens: a multiple of size · interleave.
            page_size: tokens per page of the cache that this rank's kernels read; divides page_tokens / size.

        Returns:
            [b, max_pages · n]: each page becomes n = page_tokens / size / page_size consecutive pages, -1 for a page
            below 0 or a page number that overflows the dtype. If n is 1, the table itself.

        Raises:
            ValueError: the sizes do not divide each other.
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
        # Entries after a request's last page may have any value; an overflow must not yield an existing page.
        fits = (pages >= 0) & (pages < (torch.iinfo(block_table.dtype).max + 1) // count)
        return torch.where(fits, pages * count + inside, -1).flatten(1)

    def _check_page(self, page_tokens: int) -> None:
        period = self.size * self.interleave
        if checks.positive_int("page_tokens", page_tokens) % period:
            raise ValueError(
                f"page_tokens must be a multiple of {period}, the number of ranks ({self.size}) times the interleave "
                f"({self.interleave}), got {page_tokens}"
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
