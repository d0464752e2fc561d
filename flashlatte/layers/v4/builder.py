"""From a serving engine's view of a batch to a step of DeepSeek-V4's layers; the states of requests between steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flashlatte.layers.v4.config import V4Config
from flashlatte.layers.v4.step import V4Step
from flashlatte.layers.v4.workspace import DEFAULT_LIMITS, WorkspaceLimits
from flashlatte.runtime.transfer import to_device

# Of a layer: those of groups, and those of index keys; None where there are none.
States = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class V4Metadata:
    """What a step is made from, and each layer's states.

    Attributes:
        num_tokens: of the step, padding included.
        step: makes the step. Of a padded one each call derives all from the builder's buffers, so that a CUDA graph
            that holds the call serves the steps that are put there later.
        states: of each layer. A list of its own for each place where they have lain.
    """

    num_tokens: int
    step: Callable[[], V4Step]
    states: list[States]

    @property
    def buffers(self) -> object:
        """Another object once what a captured step reads has moved."""
        return self.states


class V4Builder:
    """Makes the metadata of step after step, and keeps the states of requests.

    Args:
        layers: of the model.
        page_size: tokens in a page, which holds the groups that they finish: a multiple of every layer's ratio.
        requests: that states have room for at first, and the most of a padded step.
        max_pages: of a request.
        device: of the caches.
        drafts: tokens of a step that may be taken back, for each request.
        limits: which requests of a step that is not padded attend over a workspace.
        backend: of the steps' operations; None chooses.
    """

    def __init__(
        self,
        layers: Sequence[V4Config],
        page_size: int,
        requests: int,
        max_pages: int,
        device: torch.device,
        *,
        drafts: int = 0,
        limits: WorkspaceLimits = DEFAULT_LIMITS,
        backend: str | None = None,
    ) -> None:
        self._layers, self._page_size, self._device, self._backend = layers, page_size, device, backend
        self._limits = limits
        # A request has one page of states, a ring of so many tokens: what a group is made of, and drafts.
        self._rings: dict[int, int] = {}
        for config in layers:
            if config.ratio:
                room = (1 + config.overlap) * config.ratio + drafts
                self._rings[config.ratio] = max(room, self._rings.get(config.ratio, 0))
        self._room = requests
        with torch.inference_mode(False):
            self._states = [self._empty_states(config, requests) for config in layers]
            # Of a padded step: each token's request and position, each request's place and shared tokens; its pages.
            self._numbers = torch.zeros(4, requests, dtype=torch.int64, device=device)
            self._table = torch.zeros(requests, max_pages, dtype=torch.int32, device=device)

    def build(
        self,
        spans: Sequence[tuple[int, int]],
        block_table: torch.Tensor,
        places: Sequence[int],
        *,
        shared_tokens: Sequence[int] | None = None,
        pad_requests_to: int | None = None,
    ) -> V4Metadata:
        """The metadata of a step of n requests; n may be 0 in a padded step.

        Args:
            spans: positions of each request's new tokens, (first, end).
            block_table: int [n, pages], the pages of each request in order.
            places: of each request, a number that no other has from its first step to its last, from 0: where its
                states lie. Those of larger numbers than before get room, which moves all states.
            shared_tokens: of each request those from its start that are in caches which others read (``V4Step.build``).
            pad_requests_to: add tokens of no request up to so many, for a captured graph of that size. Only for a step
                whose requests have one new token each.

        Raises:
            ValueError: a padded step of other requests, or larger than the builder's buffers.
        """
        self._make_room(max(places, default=-1) + 1)
        shared = [0] * len(spans) if shared_tokens is None else shared_tokens
        if pad_requests_to is not None:
            self._put(spans, block_table, places, shared, pad_requests_to)
            return V4Metadata(pad_requests_to, functools.partial(self._padded_step, pad_requests_to), self._states)
        table = to_device(block_table, self._device, torch.int32)
        repeats = any(begin < count for (begin, _), count in zip(spans, shared, strict=True))
        step = V4Step.of_spans(
            spans,
            table,
            self._groups(table, to_device(places, self._device)),
            shared_tokens=to_device(shared, self._device) if repeats else None,
            window=self._layers[0].window,
            page_size=self._page_size,
            group_page_sizes=self._group_page_sizes,
            limits=self._limits,
            backend=self._backend,
        )
        return V4Metadata(step.num_tokens, lambda: step, self._states)

    def _put(
        self,
        spans: Sequence[tuple[int, int]],
        block_table: torch.Tensor,
        places: Sequence[int],
        shared: Sequence[int],
        size: int,
    ) -> None:
        """Overwrite the buffers when the steps before are done, without waiting for them."""
        requests, width = block_table.shape
        if any(end - begin != 1 for begin, end in spans):
            raise ValueError(f"pad_requests_to needs a step of one new token a request, got spans {list(spans)}")
        if not requests <= size <= len(self._table):
            raise ValueError(f"pad_requests_to must be from {requests} to {len(self._table)}, got {size}")
        if width > self._table.shape[1]:
            raise ValueError(f"block_table must have at most {self._table.shape[1]} pages, got {width}")
        nobody, nothing = [-1] * (size - requests), [0] * (size - requests)
        positions = [begin for begin, _ in spans]
        numbers = [[*range(requests), *nobody], positions + nobody, [*places, *nothing], [*shared, *nothing]]
        self._numbers[:, :size].copy_(to_device(numbers, self._device))
        self._table[:requests, :width].copy_(to_device(block_table, self._device, torch.int32))

    def _padded_step(self, size: int) -> V4Step:
        """The step in the buffers. Nothing of it is known on the host but its size."""
        request_ids, positions, places, shared = self._numbers[:, :size]
        table = self._table[:size]
        return V4Step.build(
            request_ids,
            positions,
            table,
            self._groups(table, places),
            shared_tokens=shared,
            window=self._layers[0].window,
            page_size=self._page_size,
            group_page_sizes=self._group_page_sizes,
            backend=self._backend,
        )

    def _groups(self, table: torch.Tensor, places: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Of each ratio the tables of groups and of states."""
        return dict.fromkeys(self._rings, (table, places[:, None].to(torch.int32)))

    @property
    def _group_page_sizes(self) -> dict[int, int]:
        return {ratio: self._page_size // ratio for ratio in self._rings}

    def _make_room(self, requests: int) -> None:
        if requests <= self._room:
            return
        # By a quarter at least, so seldom: all is copied, and graphs are captured anew.
        more = max(requests - self._room, self._room // 4)
        with torch.inference_mode(False):
            added = [self._empty_states(config, more) for config in self._layers]
            self._states = [
                (_joined(old[0], new[0]), _joined(old[1], new[1])) for old, new in zip(self._states, added, strict=True)
            ]
        self._room += more

    def _empty_states(self, config: V4Config, requests: int) -> States:
        if not config.ratio:
            return None, None
        room = self._rings[config.ratio]

        def states(head_dim: int) -> torch.Tensor:
            width = 2 * (1 + config.overlap) * head_dim
            return torch.zeros(requests, room, width, dtype=torch.float32, device=self._device)

        return states(config.head_dim), None if config.indexer is None else states(config.indexer.head_dim)


def _joined(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    return None if old is None or new is None else torch.cat((old, new))
