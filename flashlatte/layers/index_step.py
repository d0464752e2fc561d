"""An indexer's part of a layer's step, beside the layer's own projections."""

from __future__ import annotations

import torch

from flashlatte.layers.indexer import Indexing
from flashlatte.layers.metadata import MLAMetadata
from flashlatte.layers.selection import Selection
from flashlatte.runtime.side_stream import SideStream

# Tokens of a step whose kernels leave room on the GPU: of 64 requests of 4,096 tokens a tenth of the step is won.
MOST_TOKENS_BESIDE = 64


class IndexStep:
    """Stores the step's index keys and chooses, while the layer goes on to its absorbed queries.

    Both are chains of kernels that leave most of the GPU idle where a step has few tokens: one of 8 requests of 2,048
    takes 171 µs instead of 200 (H200).

    Args:
        indexing: the layer's indexer.
        hidden: [T, hidden_size], the step's hidden states.
        selection: what to choose into; None if the step's choice is given.
    """

    def __init__(
        self, indexing: Indexing, hidden: torch.Tensor, metadata: MLAMetadata, selection: Selection | None
    ) -> None:
        self._indexing, self._hidden = indexing, hidden
        self._metadata, self._selection = metadata, selection
        self._q_latent = self._weights = None
        few = metadata.num_tokens <= MOST_TOKENS_BESIDE and metadata.prefill is None
        # What ranks tell each other stays in the order of one stream.
        self._side = SideStream(hidden.device, few and metadata.sharding is None)

    def start(self) -> None:
        """What needs the hidden states alone."""
        self._side.run(self._store_keys)

    def select(self, q_latent: torch.Tensor | None) -> None:
        """Choose, by the query's normalised latent [T, rank]."""
        if self._selection is not None and q_latent is not None:
            # Kept until the step has ended, as the side stream may read it until then.
            self._q_latent = q_latent
            self._side.run(self._choose)

    def join(self) -> None:
        """Before what was chosen is read."""
        self._side.join()

    def _store_keys(self) -> None:
        self._indexing.store_keys(self._hidden, self._metadata.slot_mapping)
        if self._selection is not None:
            choosing = self._indexing.num_choosing(self._metadata, self._selection)
            self._weights = self._indexing.head_weights(self._hidden[:choosing])

    def _choose(self) -> None:
        if self._selection is not None and self._q_latent is not None and self._weights is not None:
            self._indexing.select(self._q_latent, self._weights, self._metadata, self._selection)
