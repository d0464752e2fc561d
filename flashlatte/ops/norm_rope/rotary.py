"""The rotation of a step's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotary:
    """The rotation of a step's tokens.

    Attributes:
        table: float32 [n, rope_dim], the cosines, then the sines of each frequency.
        positions: int32 or int64 [tokens], the table's row of each token. Positions outside the table are clamped.
        interleaved: whether a frequency rotates dims 2i and 2i + 1; else i and i + rope_dim / 2.
    """

    table: torch.Tensor
    positions: torch.Tensor
    interleaved: bool

    def part(self, start: int, stop: int | None = None) -> Rotary:
        """The rotation of tokens ``start`` to ``stop``."""
        return Rotary(self.table, self.positions[start:stop], self.interleaved)
