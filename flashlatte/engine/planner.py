"""From a batch to the metadata of a model's layers."""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import torch

from flashlatte.engine.batch import Batch
from flashlatte.layers import MLAMetadata, MLAMetadataBuilder


class Planner(Protocol):
    """Makes metadata of steps; what it returns has ``num_tokens``.

    Attributes:
        fits_graphs: whether steps that only generate may be captured: their metadata lies where the last one's did.
    """

    fits_graphs: bool

    def plan(self, batch: Batch, pad_to: int | None) -> Any:
        """The metadata of a batch, with padding up to so many requests if ``pad_to`` is given (for a graph)."""


class MLAPlanner:
    """The planner of MLA layers, whose requests need nothing but their pages."""

    fits_graphs = True

    def __init__(self, builder: MLAMetadataBuilder) -> None:
        self._builder = builder

    def plan(self, batch: Batch, pad_to: int | None) -> MLAMetadata:
        starts = [0, *itertools.accumulate(batch.counts)]
        return self._builder.build(starts, batch.lengths, page_table(batch), pad_requests_to=pad_to)


def page_table(batch: Batch) -> torch.Tensor:
    """int32 [requests, most pages] on the host, the pages of each request in order, then -1."""
    table = torch.full((len(batch.pages), max(map(len, batch.pages))), -1, dtype=torch.int32)
    for row, numbers in enumerate(batch.pages):
        table[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
    return table
