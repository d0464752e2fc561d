"""A request as the scheduler sees it: tokens, pages, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Request:
    """What somebody asked for, and its state.

    Attributes:
        id: unlike that of any other unfinished request.
        prompt: tokens to continue, at least one.
        max_new_tokens: tokens to generate, at least one.
        priority: 0 is usual, lower comes first (see ``Scheduler``).
        salt: only requests with the same salt share cached pages.
        tokens: the prompt and what was generated and is known.
        pending: tokens that steps under way will add.
        computed: tokens from the start that are in the cache, or will be when the steps under way have run.
        pages: device pages of the computed tokens, in order; host_pages: their copies while it is swapped out.
        sealed: pages that were offered to the prefix cache; chain: the key behind them.
        cached: tokens that did not have to be computed, as the prefix cache had them.
        drafts: guesses of the tokens to come, which the next step verifies.
    """

    id: str
    prompt: list[int]
    max_new_tokens: int
    priority: int = 0
    salt: str = ""
    tokens: list[int] = field(default_factory=list)
    pending: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    host_pages: list[int] = field(default_factory=list)
    sealed: int = 0
    chain: bytes = b""
    cached: int = 0
    drafts: list[int] = field(default_factory=list)
    verifying: bool = False
    finished: bool = False
    order: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"prompt of request {self.id!r} must have at least one token, got none")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens of request {self.id!r} must be at least 1, got {self.max_new_tokens}")
        self.tokens = list(self.prompt)

    @property
    def length(self) -> int:
        """Tokens, those under way included."""
        return len(self.tokens) + self.pending

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def to_generate(self) -> int:
        """Tokens that no step was made for yet."""
        return len(self.prompt) + self.max_new_tokens - self.length

    @property
    def most_cached(self) -> int:
        """Tokens that it can come to have in the cache: its last one never goes there."""
        return len(self.prompt) + self.max_new_tokens - 1
