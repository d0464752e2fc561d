"""The scheduler's record of a request, and a step: pages to copy, and the tokens to compute for each request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flashlatte.engine.prompt_lookup import PromptLookup

PageCopies = list[tuple[int, int]]
# The slot of the states before a request's first token.
ZERO_STATES = 0


@dataclass
class RequestStates:
    """The slots of a request's states of linear attention (``StateSlots``).

    Attributes:
        slot: slot on the device while the request runs; ``ZERO_STATES`` otherwise.
        host_slot: slot on the host while the request is swapped out; -1 otherwise.
        source: slot of the states from which the request starts.
        num_matched_tokens: leading tokens whose pages were cached at the start, also those without a snapshot.
        last_known_border: number of tokens in full pages that precede the last token that was known at the start.
        taken: slots of snapshots that are not registered yet, by the number of tokens before them.
        keys: page hashes of the snapshots that the request has registered.
        generated: the latest of these hashes whose snapshot follows generated tokens.
    """

    slot: int = ZERO_STATES
    host_slot: int = -1
    source: int = ZERO_STATES
    num_matched_tokens: int = 0
    last_known_border: int = 0
    taken: dict[int, int] = field(default_factory=dict)
    keys: list[bytes] = field(default_factory=list)
    generated: bytes | None = None


@dataclass(eq=False)
class Request:
    """One sequence to generate, and its state.

    Attributes:
        id: unique among unfinished requests.
        prompt: tokens to continue, at least one.
        max_tokens: tokens to generate, at least one.
        priority: default 0; lower values run earlier (see ``Scheduler``).
        cache_salt: only requests with the same salt share cached pages.
        sampling: the sampling parameters. The scheduler does not read them.
        scores_prompt: whether log-probabilities of the prompt's tokens are computed.
        tokens: the prompt and the generated tokens that the host has received.
        num_scored_tokens: leading prompt tokens that have log-probabilities, or will have after the steps in flight.
        pending: tokens that steps in flight will add.
        num_computed_tokens: leading tokens that are in the cache, or will be after the steps in flight.
        pages: device pages of the computed tokens, in order.
        host_pages: host pages of the computed tokens while the request is swapped out.
        num_shared_tokens: leading tokens whose pages came from the prefix cache and must not be written.
        num_registered_pages: pages that were offered to the prefix cache.
        page_hash: hash of the last registered page.
        num_cached_tokens: leading prompt tokens that the prefix cache provided at the first start; None before it.
        draft_tokens: proposed next tokens, which the next step verifies.
        verifying: whether a step in flight verifies draft tokens.
        prompt_lookup: proposes the draft tokens.
        order: position in the queues.
        state_index: row of the request in the runner's per-request state, from its first step on; -1 before.
        states: slots of the states of linear attention.
    """

    id: str
    prompt: list[int]
    max_tokens: int
    priority: int = 0
    cache_salt: str = ""
    sampling: Any = None
    scores_prompt: bool = False
    tokens: list[int] = field(default_factory=list)
    num_scored_tokens: int = 1  # the first token has none
    pending: int = 0
    num_computed_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    host_pages: list[int] = field(default_factory=list)
    num_shared_tokens: int = 0
    num_registered_pages: int = 0
    page_hash: bytes = b""
    num_cached_tokens: int | None = None
    draft_tokens: list[int] = field(default_factory=list)
    prompt_lookup: PromptLookup = field(default_factory=PromptLookup)
    verifying: bool = False
    finished: bool = False
    order: tuple[int, int] = (0, 0)
    state_index: int = -1
    states: RequestStates = field(default_factory=RequestStates)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"prompt of request {self.id!r} must have at least one token, got none")
        self.tokens = list(self.prompt)

    @property
    def length(self) -> int:
        """Number of tokens, including those of steps in flight."""
        return len(self.tokens) + self.pending

    @property
    def max_length(self) -> int:
        """Number of tokens of the prompt and of the longest possible output."""
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True)
class ScheduledRequest:
    """``count`` tokens of a request from position ``start``. The last ``num_drafts`` of them are draft tokens.

    ``samples``: whether the step computes the request's last token, so that it samples the next one.
    ``num_scored``: prompt tokens whose log-probabilities the step computes; the last of them is at position
    ``start + count``, or ends the prompt.
    ``snapshots``: (number of its tokens, slot): the states after so many tokens are copied to the slot.
    """

    request: Request
    start: int
    count: int
    num_drafts: int
    samples: bool
    num_scored: int = 0
    snapshots: list[tuple[int, int]] = field(default_factory=list)

    @property
    def scored(self) -> range:
        """Positions of the prompt tokens whose log-probabilities the step computes."""
        end = min(self.start + self.count + 1, len(self.request.prompt))
        return range(end - self.num_scored, end)


@dataclass
class Step:
    """The work of a step, in this order.

    Attributes:
        swap_out: (device page, host page) pairs to copy.
        swap_in: (host page, device page) pairs to copy.
        state_swap_out, state_swap_in: the same for slots of states.
        state_copies: (source, target) pairs of device slots: snapshots, or zeros, for requests that start.
        scheduled: requests that generate, then chunks of prompts.
        token_budget: tokens that can still be added.
        preempted: whether the step preempted a request.
    """

    swap_out: PageCopies = field(default_factory=list)
    swap_in: PageCopies = field(default_factory=list)
    state_swap_out: PageCopies = field(default_factory=list)
    state_swap_in: PageCopies = field(default_factory=list)
    state_copies: PageCopies = field(default_factory=list)
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    token_budget: int = 0
    preempted: bool = False

    def add(self, scheduled: ScheduledRequest) -> None:
        self.scheduled.append(scheduled)
        self.token_budget -= scheduled.count
