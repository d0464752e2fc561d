"""A request as the scheduler sees it, and a step: which pages move, and which tokens of which requests are computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flashlatte.engine.drafts import PromptLookup

Copies = list[tuple[int, int]]


@dataclass(eq=False)
class Request:
    """What somebody asked for, and its state.

    Attributes:
        id: unlike that of any other unfinished request.
        prompt: tokens to continue, at least one.
        max_new_tokens: tokens to generate, at least one.
        priority: 0 is usual, lower comes first (see ``Scheduler``).
        salt: only requests with the same salt share cached pages.
        sampling: how its tokens are chosen, which the scheduler need not know.
        tokens: the prompt and what was generated and is known.
        pending: tokens that steps under way will add.
        computed: tokens from the start that are in the cache, or will be when the steps under way have run.
        pages: device pages of the computed tokens, in order; host_pages: their copies while it is swapped out.
        shared: tokens from the start that the prefix cache had, in pages that others may read.
        sealed: pages that were offered to the prefix cache; chain: the key behind them.
        cached: tokens that the prefix cache had whenever it began or began again.
        drafts: guesses of the tokens to come, which the next step verifies; verifying: a step that does is under way.
        lookup: where they come from.
        order: by which requests are served.
        place: from its first step a number that no other has while it lives: where the runner keeps its last token.
    """

    id: str
    prompt: list[int]
    max_new_tokens: int
    priority: int = 0
    salt: str = ""
    sampling: Any = None
    tokens: list[int] = field(default_factory=list)
    pending: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    host_pages: list[int] = field(default_factory=list)
    shared: int = 0
    sealed: int = 0
    chain: bytes = b""
    cached: int = 0
    drafts: list[int] = field(default_factory=list)
    lookup: PromptLookup = field(default_factory=PromptLookup)
    verifying: bool = False
    finished: bool = False
    order: tuple[int, int] = (0, 0)
    place: int = -1

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"prompt of request {self.id!r} must have at least one token, got none")
        self.tokens = list(self.prompt)

    @property
    def length(self) -> int:
        """Tokens, those under way included."""
        return len(self.tokens) + self.pending

    @property
    def most_tokens(self) -> int:
        return len(self.prompt) + self.max_new_tokens


@dataclass(frozen=True)
class Work:
    """``count`` tokens of a request from position ``start``, the last ``drafts`` of them guesses to be verified.

    ``samples``: the last token is the request's last one, so that a new one follows.
    """

    request: Request
    start: int
    count: int
    drafts: int
    samples: bool


@dataclass
class Step:
    """What a step does, in this order.

    Attributes:
        swap_out: (device page, host page) to copy.
        swap_in: (host page, device page) to copy.
        work: requests that generate first, then chunks of prompts.
        left: tokens that there is room for beside them.
        gave_way: whether somebody gave way for it.
    """

    swap_out: Copies = field(default_factory=list)
    swap_in: Copies = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    left: int = 0
    gave_way: bool = False

    def add(self, work: Work) -> None:
        self.work.append(work)
        self.left -= work.count
