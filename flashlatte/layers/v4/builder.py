"""From a serving engine's view of a batch to a step of DeepSeek-V4's layers; the states of requests between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashlatte.layers.v4.config import V4Config
from flashlatte.layers.v4.step import V4Step
from flashlatte.runtime.transfer import to_device

# Of a layer: those of groups, and those of index keys; None where there are none.
States = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class V4Metadata:
    """A step, and each layer's states."""

    step: V4Step
    states: list[States]

    @property
    def num_tokens(self) -> int:
        return self.step.num_tokens


class V4Builder:
    """Makes the metadata of step after step, and keeps the states of requests.

    Args:
        layers: of the model.
        page_size: tokens in a page, which holds the groups that they finish: a multiple of every layer's ratio.
        requests: that states have room for at first.
        device: of the caches.
        backend: of the steps' operations; None chooses.
    """

    def __init__(
        self,
        layers: Sequence[V4Config],
        page_size: int,
        requests: int,
        device: torch.device,
        *,
        backend: str | None = None,
    ) -> None:
        self._layers, self._page_size, self._device, self._backend = layers, page_size, device, backend
        # A ring of so many pages of ratio tokens for each request: what a group is made of.
        self._rings: dict[int, int] = {}
        for config in layers:
            if config.ratio:
                self._rings[config.ratio] = max(1 + config.overlap, self._rings.get(config.ratio, 0))
        self._room = requests
        self._states = [self._empty_states(config, requests) for config in layers]

    def build(self, spans: Sequence[tuple[int, int]], block_table: torch.Tensor, places: Sequence[int]) -> V4Metadata:
        """The metadata of a step of n requests.

        Args:
            spans: positions of each request's new tokens, (first, end).
            block_table: int [n, pages], the pages of each request in order.
            places: of each request, a number that no other has from its first step to its last, from 0: where its
                states lie. Those of larger numbers than before get room.
        """
        self._make_room(max(places) + 1)
        table = to_device(block_table, self._device, torch.int32)
        firsts = torch.tensor(places, dtype=torch.int32)[:, None]
        groups, sizes = {}, {}
        for ratio, pages in self._rings.items():
            ring = firsts * pages + torch.arange(pages, dtype=torch.int32)
            groups[ratio] = table, to_device(ring, self._device, torch.int32)
            sizes[ratio] = self._page_size // ratio
        step = V4Step.of_spans(
            spans,
            table,
            groups,
            window=self._layers[0].window,
            page_size=self._page_size,
            group_page_sizes=sizes,
            backend=self._backend,
        )
        return V4Metadata(step, self._states)

    def _make_room(self, requests: int) -> None:
        more = max(requests - self._room, 0)
        if more == 0:
            return
        added = [self._empty_states(config, more) for config in self._layers]
        self._states = [
            (_joined(old[0], new[0]), _joined(old[1], new[1])) for old, new in zip(self._states, added, strict=True)
        ]
        self._room += more

    def _empty_states(self, config: V4Config, requests: int) -> States:
        if not config.ratio:
            return None, None
        pages = requests * self._rings[config.ratio]

        def states(head_dim: int) -> torch.Tensor:
            width = 2 * (1 + config.overlap) * head_dim
            return torch.zeros(pages, config.ratio, width, dtype=torch.float32, device=self._device)

        return states(config.head_dim), None if config.indexer is None else states(config.indexer.head_dim)


def _joined(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    return None if old is None or new is None else torch.cat((old, new))
