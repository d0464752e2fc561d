"""Builds the steps of DeepSeek-V4's layers from a batch, and owns the compression states of requests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashlatte.layers.v4.config import V4Config
from flashlatte.layers.v4.step import V4Step
from flashlatte.layers.v4.workspace import DEFAULT_LIMITS, WorkspaceLimits
from flashlatte.runtime.transfer import to_device

# A layer's states of groups and of index keys; None if the layer has none.
States = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class V4Metadata:
    """A step and each layer's states.

    Attributes:
        num_tokens: tokens of the step, padding included.
        step: returns the step. For a padded step, each call derives the step from the builder's buffers, so that a
            CUDA graph that captures the call can be replayed after the buffers were overwritten.
        states: states of each layer; a new list whenever they are reallocated.
    """

    num_tokens: int
    step: Callable[[], V4Step]
    states: list[States]

    @property
    def buffers(self) -> object:
        """Identity of the buffers that a captured step reads; another object after they were reallocated."""
        return self.states


class V4Builder:
    """Builds the metadata of each step, and owns the states of requests.

    Args:
        layers: configurations of the model's layers.
        page_size: tokens in a page, a multiple of every layer's ratio. A page also holds the groups of its tokens.
        requests: initial number of requests that have states; also the size of the largest padded step.
        max_pages: maximum number of pages of a request.
        device: device of the caches.
        num_speculative_tokens: tokens of a step that may be rejected, for each request.
        limits: which requests of an unpadded step attend over a workspace.
        backend: backend of the steps' operations; None selects one.
    """

    def __init__(
        self,
        layers: Sequence[V4Config],
        page_size: int,
        requests: int,
        max_pages: int,
        device: torch.device,
        *,
        num_speculative_tokens: int = 0,
        limits: WorkspaceLimits = DEFAULT_LIMITS,
        backend: str | None = None,
    ) -> None:
        self._layers, self._page_size, self._device, self._backend = layers, page_size, device, backend
        self._limits = limits
        # A request has one page of states, a ring buffer of the tokens that form a group and of speculative tokens.
        self._ring_sizes: dict[int, int] = {}
        for config in layers:
            if config.ratio:
                ring_size = (1 + config.overlap) * config.ratio + num_speculative_tokens
                self._ring_sizes[config.ratio] = max(ring_size, self._ring_sizes.get(config.ratio, 0))
        self._capacity = requests
        with torch.inference_mode(False):
            self._states = [self._empty_states(config, requests) for config in layers]
            # Buffers of padded steps: each token's request and position, each request's state page and shared tokens.
            self._columns = torch.zeros(4, requests, dtype=torch.int64, device=device)
            self._table = torch.zeros(requests, max_pages, dtype=torch.int32, device=device)

    def build(
        self,
        spans: Sequence[tuple[int, int]],
        block_table: torch.Tensor,
        state_pages: Sequence[int],
        *,
        shared_tokens: Sequence[int] | None = None,
        pad_requests_to: int | None = None,
    ) -> V4Metadata:
        """Build the metadata of a step of n requests; n may be 0 in a padded step.

        Args:
            spans: positions of each request's new tokens, (first, end).
            block_table: int [n, pages], the pages of each request in order.
            state_pages: the state page of each request, from 0, which it owns from its first step to its last. A
                larger value than before reallocates all states.
            shared_tokens: leading tokens of each request that are in caches which others read (``V4Step.build``).
            pad_requests_to: pad the step to this many tokens, for a captured graph of that size. Only for steps whose
                requests have one new token each.

        Raises:
            ValueError: a padded step with other requests, or larger than the builder's buffers.
        """
        self._grow(max(state_pages, default=-1) + 1)
        shared = [0] * len(spans) if shared_tokens is None else shared_tokens
        if pad_requests_to is not None:
            self._copy_in(spans, block_table, state_pages, shared, pad_requests_to)
            return V4Metadata(pad_requests_to, functools.partial(self._padded_step, pad_requests_to), self._states)
        table = to_device(block_table, self._device, torch.int32)
        has_repeated_tokens = any(begin < count for (begin, _), count in zip(spans, shared, strict=True))
        step = V4Step.from_spans(
            spans,
            table,
            self._groups(table, to_device(state_pages, self._device)),
            shared_tokens=to_device(shared, self._device) if has_repeated_tokens else None,
            limits=self._limits,
            **self._options,
        )
        return V4Metadata(step.num_tokens, lambda: step, self._states)

    def _copy_in(
        self,
        spans: Sequence[tuple[int, int]],
        block_table: torch.Tensor,
        state_pages: Sequence[int],
        shared: Sequence[int],
        size: int,
    ) -> None:
        """Copy a padded step into the buffers, in stream order and without synchronizing."""
        requests, width = block_table.shape
        if any(end - begin != 1 for begin, end in spans):
            raise ValueError(f"pad_requests_to needs one new token for each request, got spans {list(spans)}")
        if not requests <= size <= len(self._table):
            raise ValueError(f"pad_requests_to must be from {requests} to {len(self._table)}, got {size}")
        if width > self._table.shape[1]:
            raise ValueError(f"block_table must have at most {self._table.shape[1]} pages, got {width}")
        no_request, zeros = [-1] * (size - requests), [0] * (size - requests)
        positions = [begin for begin, _ in spans]
        columns = [[*range(requests), *no_request], positions + no_request, [*state_pages, *zeros], [*shared, *zeros]]
        self._columns[:, :size].copy_(to_device(columns, self._device))
        self._table[:requests, :width].copy_(to_device(block_table, self._device, torch.int32))

    def _padded_step(self, size: int) -> V4Step:
        """The step in the buffers. The host uses only its size."""
        request_ids, positions, state_pages, shared = self._columns[:, :size]
        table = self._table[:size]
        groups = self._groups(table, state_pages)
        return V4Step.build(request_ids, positions, table, groups, shared_tokens=shared, **self._options)

    def _groups(self, table: torch.Tensor, state_pages: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """The tables of groups and of states by ratio."""
        return dict.fromkeys(self._ring_sizes, (table, state_pages[:, None].to(torch.int32)))

    @property
    def _options(self) -> dict[str, Any]:
        """Arguments of every step."""
        group_page_sizes = {ratio: self._page_size // ratio for ratio in self._ring_sizes}
        sizes = {"window": self._layers[0].window, "page_size": self._page_size, "group_page_sizes": group_page_sizes}
        return {**sizes, "backend": self._backend}

    def _grow(self, requests: int) -> None:
        if requests <= self._capacity:
            return
        # Grow by at least a quarter: all states are copied, and graphs must be captured again.
        more = max(requests - self._capacity, self._capacity // 4)
        with torch.inference_mode(False):
            added = [self._empty_states(config, more) for config in self._layers]
            self._states = [
                (_concat(old[0], new[0]), _concat(old[1], new[1])) for old, new in zip(self._states, added, strict=True)
            ]
        self._capacity += more

    def _empty_states(self, config: V4Config, requests: int) -> States:
        ring_size = self._ring_sizes.get(config.ratio, 0)

        def states(width: int) -> torch.Tensor | None:
            if not width:
                return None
            return torch.zeros(requests, ring_size, width, dtype=torch.float32, device=self._device)

        return states(config.state_dim), states(config.index_state_dim)


def _concat(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    return None if old is None or new is None else torch.cat((old, new))
