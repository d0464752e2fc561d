"""The plain-integer form of a step that every rank computes, and the limits of all steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flashlatte.engine.request import PageCopies, Step


@dataclass(frozen=True)
class EngineLimits:
    """Sizes of the caches and of a step.

    Attributes:
        num_pages: pages of the cache, on each rank.
        page_size: tokens in a page, on each rank.
        swap_space: pages of the copy of the cache on the host.
        max_num_batched_tokens: tokens of a step.
        max_num_seqs: requests of a step.
        num_speculative_tokens: draft tokens of a request in a step.
        num_snapshots: snapshots of the states of linear attention, for the prefix cache.
    """

    num_pages: int
    page_size: int
    swap_space: int
    max_num_batched_tokens: int
    max_num_seqs: int
    num_speculative_tokens: int = 0
    num_snapshots: int = 0

    @property
    def num_state_slots(self) -> int:
        """Slots of states on the device: zeros, requests, snapshots."""
        return 1 + self.max_num_seqs + self.num_snapshots

    @property
    def num_host_states(self) -> int:
        """Slots of states on the host. A request that is swapped out has a page there, or more."""
        return min(self.swap_space, self.max_num_seqs)


@dataclass(frozen=True)
class StepBatch:
    """The inputs of a step, without its requests. Rank 0 sends it to the other ranks.

    Attributes:
        swap_out, swap_in: pages to copy first, as in ``Step``.
        counts: number of new tokens of each request.
        lengths: number of tokens of each request, including the new ones.
        num_shared_tokens: leading tokens of each request whose pages are shared and must not be written.
        pages: pages of each request, in order.
        state_indices: ``Request.state_index`` of each request.
        tokens: ids of the flat batch; -1 - i stands for the last token sampled for state index i, which only the
            device has.
        rows: rows of the flat batch whose logits are needed: to sample, then to score prompt tokens.
        kept: state index at which each sampled token is stored; empty if the host verifies draft tokens first.
        state_swap_out, state_swap_in, state_copies: slots of states to copy after the pages, as in ``Step``.
        state_slots: slot of the states of each request.
        snapshots: snapshots to take of each request, as in ``ScheduledRequest``.
    """

    swap_out: PageCopies
    swap_in: PageCopies
    counts: list[int]
    lengths: list[int]
    num_shared_tokens: list[int]
    pages: list[list[int]]
    state_indices: list[int]
    tokens: list[int]
    rows: list[int]
    kept: list[int]
    state_swap_out: PageCopies = field(default_factory=list)
    state_swap_in: PageCopies = field(default_factory=list)
    state_copies: PageCopies = field(default_factory=list)
    state_slots: list[int] = field(default_factory=list)
    snapshots: list[list[tuple[int, int]]] = field(default_factory=list)

    @classmethod
    def of(cls, step: Step) -> StepBatch:
        """The batch of a step whose requests all have a state index."""
        tokens: list[int] = []
        sampled: list[int] = []
        scored: list[int] = []
        for one in step.scheduled:
            known = [*one.request.tokens, *one.request.draft_tokens] if one.num_drafts else one.request.tokens
            new = known[one.start : one.start + one.count]
            tokens += new + [-1 - one.request.state_index] * (one.count - len(new))
            begin = len(tokens) - one.count - one.start
            scored += [begin + position - 1 for position in one.scored]
            if one.samples:
                sampled += range(len(tokens) - 1 - one.num_drafts, len(tokens))
        sampling = [one for one in step.scheduled if one.samples]
        return cls(
            step.swap_out,
            step.swap_in,
            [one.count for one in step.scheduled],
            [one.start + one.count for one in step.scheduled],
            [one.request.num_shared_tokens for one in step.scheduled],
            [one.request.pages for one in step.scheduled],
            [one.request.state_index for one in step.scheduled],
            tokens,
            [*sampled, *scored],
            [] if any(one.num_drafts for one in sampling) else [one.request.state_index for one in sampling],
            step.state_swap_out,
            step.state_swap_in,
            step.state_copies,
            [one.request.states.slot for one in step.scheduled],
            [one.snapshots for one in step.scheduled],
        )

    @property
    def one_token_each(self) -> bool:
        """Whether each request computes one token, as in a decode step."""
        return all(count == 1 for count in self.counts)

    def page_table(self) -> torch.Tensor:
        """int32 [requests, max pages] on the host: the pages of each request in order, padded with -1."""
        width = max(map(len, self.pages))
        rows = [numbers + [-1] * (width - len(numbers)) for numbers in self.pages]
        return torch.tensor(rows, dtype=torch.int32, device="cpu")
