"""A step in numbers: all that a rank needs to compute it, whoever planned it; and the limits of all steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte.engine.request import Copies, Step


@dataclass(frozen=True)
class Limits:
    """What steps are planned within.

    Attributes:
        num_pages, page_size: of the cache, and the tokens of a page, on each rank.
        host_pages: of its copy on the host.
        max_tokens, max_requests: of a step.
        drafts: of a request in a step.
    """

    num_pages: int
    page_size: int
    host_pages: int
    max_tokens: int
    max_requests: int
    drafts: int = 0


@dataclass(frozen=True)
class Batch:
    """What a step computes, without its requests. It is sent to other ranks as it is.

    Attributes:
        swap_out, swap_in: pages to copy first, as in ``Step``.
        counts, lengths: of each request its new tokens, and all its tokens with them.
        shared: of each request its tokens from the start that are in pages which others may read: they are not written.
        pages: of each request, in order.
        places: of each request (``Request.place``).
        tokens: ids of the flat batch; -1 - p for the token that was last kept at place p, as the device alone knows it.
        rows: of the flat batch, whose logits are sampled.
        kept: the place where each sampled token is kept; empty if the host verifies them first.
    """

    swap_out: Copies
    swap_in: Copies
    counts: list[int]
    lengths: list[int]
    shared: list[int]
    pages: list[list[int]]
    places: list[int]
    tokens: list[int]
    rows: list[int]
    kept: list[int]

    @classmethod
    def of(cls, step: Step) -> Batch:
        """The numbers of a step whose requests have their places."""
        tokens: list[int] = []
        rows: list[int] = []
        for work in step.work:
            known = [*work.request.tokens, *work.request.drafts] if work.drafts else work.request.tokens
            new = known[work.start : work.start + work.count]
            tokens += new + [-1 - work.request.place] * (work.count - len(new))
            if work.samples:
                rows += range(len(tokens) - 1 - work.drafts, len(tokens))
        sampling = [work for work in step.work if work.samples]
        return cls(
            step.swap_out,
            step.swap_in,
            [work.count for work in step.work],
            [work.start + work.count for work in step.work],
            [work.request.shared for work in step.work],
            [work.request.pages for work in step.work],
            [work.request.place for work in step.work],
            tokens,
            rows,
            [] if any(work.drafts for work in sampling) else [work.request.place for work in sampling],
        )

    @property
    def generates(self) -> bool:
        """Whether each request computes one token, as where all of them generate."""
        return all(count == 1 for count in self.counts)

    def page_table(self) -> torch.Tensor:
        """int32 [requests, most pages] on the host, the pages of each request in order, then -1."""
        width = max(map(len, self.pages))
        rows = [numbers + [-1] * (width - len(numbers)) for numbers in self.pages]
        return torch.tensor(rows, dtype=torch.int32, device="cpu")
