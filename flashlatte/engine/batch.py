"""A step in numbers: all that a rank needs to compute it, whoever planned it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashlatte.engine.step import Copies, Step


@dataclass(frozen=True)
class Batch:
    """What a step computes, without its requests. It is sent to other ranks as it is.

    Attributes:
        swap_out, swap_in: pages to copy first, as in ``Step``.
        counts, lengths: of each request its new tokens, and all its tokens with them.
        pages: of each request, in order.
        places: of each request, a number that no other has while it lives.
        tokens: ids of the flat batch; 0 where only the device knows it.
        unknown: places in the flat batch of tokens that only the device knows; origins: where each was kept.
        rows: of the flat batch, whose logits are sampled.
        kept: where each sampled token is kept on the device; empty if the host verifies them first.
        generates: whether each request computes the one token that a new one follows.
    """

    swap_out: Copies
    swap_in: Copies
    counts: list[int]
    lengths: list[int]
    pages: list[list[int]]
    places: list[int]
    tokens: list[int]
    unknown: list[int]
    origins: list[int]
    rows: list[int]
    kept: list[int]
    generates: bool


def make_batch(step: Step, places: Mapping[str, int]) -> Batch:
    """The numbers of a step.

    Args:
        places: by id of each request, where its last sampled token is kept on the device.
    """
    tokens: list[int] = []
    unknown, origins, rows, kept = [], [], [], []
    for work in step.work:
        request = work.request
        known = [*request.tokens, *request.drafts] if work.drafts else request.tokens
        end = work.start + work.count
        for position in range(max(work.start, len(known)), end):
            unknown.append(len(tokens) + position - work.start)
            origins.append(places[request.id])
        tokens += known[work.start : end]
        tokens += [0] * max(end - max(work.start, len(known)), 0)
        if work.samples:
            rows += range(len(tokens) - 1 - work.drafts, len(tokens))
            kept.append(places[request.id])
    return Batch(
        step.swap_out,
        step.swap_in,
        [work.count for work in step.work],
        [work.start + work.count for work in step.work],
        [list(work.request.pages) for work in step.work],
        [places[work.request.id] for work in step.work],
        tokens,
        unknown,
        origins,
        rows,
        [] if any(work.drafts for work in step.work if work.samples) else kept,
        all(work.count == 1 and work.samples for work in step.work),
    )
