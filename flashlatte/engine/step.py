"""A step of the engine: which pages move, and which tokens are computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashlatte.engine.request import Request

Copies = list[tuple[int, int]]


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
    """

    swap_out: Copies = field(default_factory=list)
    swap_in: Copies = field(default_factory=list)
    work: list[Work] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(work.count for work in self.work)
