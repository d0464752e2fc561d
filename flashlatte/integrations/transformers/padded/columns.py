"""Tracks which columns of a padded batch are stored tokens.

A token that the attention mask hides in its own pass is a column, but is never stored.
"""

from __future__ import annotations

import torch


class Columns:
    """The columns of a batch's history.

    Attributes:
        requests: rows of the batch.
        count: columns so far.
    """

    def __init__(self, requests: int, device: torch.device) -> None:
        self.requests = requests
        self.count = 0
        self._device = device
        self._stored: torch.Tensor | None = None  # bool [requests, count]; None if all are

    def compare(self, mask: torch.Tensor | None, queries: int) -> tuple[bool, torch.Tensor | None]:
        """Compare a mask [requests, count + queries] with the stored columns; synchronizes once.

        ``mask`` is None if all tokens are visible; columns missing on the right are hidden, as in transformers.

        Returns:
            Whether all stored columns are visible, and which new ones are: bool [requests, queries], None for all.

        Raises:
            ValueError: a column is visible that is not stored.
        """
        if mask is None:
            if self._stored is not None and not self._stored.all():
                raise ValueError(
                    "attention_mask must be given as one value for each token, past and new, got None: the cache was "
                    "filled from a padded batch, and does not store the tokens that its mask hid"
                )
            return True, None
        if mask.shape[0] != self.requests:
            raise ValueError(f"attention_mask must have {self.requests} rows like the input, got {mask.shape[0]}")
        total = self.count + queries
        mask = torch.nn.functional.pad(mask.to(self._device, torch.bool), (0, max(0, total - mask.shape[1])))
        visible, new = mask[:, : self.count], mask[:, self.count : total]
        stored = self.stored()
        unknown, differs, hides = torch.stack(
            ((visible & ~stored).any(), (visible != stored).any(), (~new).any())
        ).tolist()
        if unknown:
            raise ValueError(
                "attention_mask must not show past tokens that an earlier mask hid, since they are not stored: pass "
                "the earlier mask, extended by one value for each new token"
            )
        return not differs, new if hides else None

    @property
    def has_hidden(self) -> bool:
        """Whether a column may be hidden."""
        return self._stored is not None

    def stored(self) -> torch.Tensor:
        """Stored columns, bool [requests, count]."""
        if self._stored is not None:
            return self._stored
        return torch.ones(self.requests, self.count, dtype=torch.bool, device=self._device)

    def positions(self) -> torch.Tensor:
        """Each column's position among its request's stored tokens, int64 [requests, count]; −1 if not stored."""
        stored = self.stored()
        return torch.where(stored, stored.cumsum(dim=1) - 1, -1)

    def append(self, queries: int, stored: torch.Tensor | None) -> None:
        """Add ``queries`` columns, of which ``stored`` [requests, queries] (None: all) are stored."""
        if stored is not None or self._stored is not None:
            if stored is None:
                stored = torch.ones(self.requests, queries, dtype=torch.bool, device=self._device)
            self._stored = torch.cat((self.stored(), stored), dim=1)
        self.count += queries

    def drop(self, count: int) -> torch.Tensor:
        """Remove the last ``count`` columns; returns the number of removed stored tokens, int32 [requests]."""
        dropped = self.stored()[:, self.count - count :].sum(dim=1, dtype=torch.int32)
        if self._stored is not None:
            self._stored = self._stored[:, : self.count - count]
        self.count -= count
        return dropped

    def select(self, requests: torch.Tensor) -> None:
        """Replace the batch by requests of it, given by index (int [n], repeats allowed)."""
        self.requests = requests.shape[0]
        if self._stored is not None:
            self._stored = self._stored[requests]
