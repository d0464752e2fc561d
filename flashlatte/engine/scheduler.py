"""Which tokens of which requests the next step computes, in which pages. Numbers and lists only.

Continuous batching under a budget of tokens: every running request that generates gets its token first, the rest goes
to prompts, in chunks. When pages run out the latest request gives way: its pages move to the host, or are computed
again. Nothing is admitted in a step that took pages from somebody.

Requests are served in the order of ``arrival + patience · priority``, an arrival being the number of steps scheduled
before it. So a lower priority goes first, but whoever waits is in the end before all that come later, and the first in
order can always take the pages of the others: nobody starves, and nothing deadlocks.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from flashlatte.engine.pages import PagePool
from flashlatte.engine.request import Request, Step, Work


@dataclass
class Statistics:
    """Counts since the start, in tokens and in events."""

    computed_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    swapped: int = 0
    recomputed: int = 0


class Scheduler:
    """Plans steps over a pool of pages.

    ``schedule`` may run ahead: it can be called again before ``update`` was told of the last step, so that the host
    plans while the device computes. Requests whose drafts are under way wait for their ``update``.

    Args:
        pool: pages of the cache.
        host_pool: pages of its copy on the host; None: what gives way is computed again.
        max_tokens: of a step. max_requests: that run at a time.
        patience: steps that a priority lower by one is worth.
        prefix_cache: whether requests that begin alike share pages.
        repeats: tokens at the end of a shared beginning that are computed again (``PagedModel.repeats``).
        apart: whether what a step computes of a prompt depends on that request alone: its chunks are of ``max_tokens``,
            each a step of its own, and come before the tokens of those who generate. Only pages of whole chunks are
            shared, and what was generated is computed token by token, also when it is computed again.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        host_pool: PagePool | None = None,
        max_tokens: int = 2048,
        max_requests: int = 64,
        patience: int = 64,
        prefix_cache: bool = True,
        repeats: int = 0,
        apart: bool = False,
    ) -> None:
        self.pool, self.host_pool = pool, host_pool or PagePool(0, pool.page_size)
        self.max_tokens, self.max_requests, self.patience = max_tokens, max_requests, patience
        self.prefix_cache, self.repeats, self.apart = prefix_cache, repeats, apart
        self.statistics = Statistics()
        self._running, self._waiting = list[Request](), list[Request]()
        self._unfinished: dict[str, Request] = {}
        self._steps = self._arrivals = 0

    def __len__(self) -> int:
        """Unfinished requests."""
        return len(self._unfinished)

    def check(self, request: Request) -> None:
        """Raise ValueError for an id that is in use, and for more tokens than the cache has room for."""
        if request.id in self._unfinished:
            raise ValueError(f"id must differ from those of unfinished requests, got {request.id!r} again")
        room = self.pool.num_pages * self.pool.page_size
        needed = request.most_tokens - 1  # the last one never goes there
        if needed > room:
            raise ValueError(
                f"request {request.id!r} needs room for {needed} tokens (its prompt and max_new_tokens), "
                f"and the cache has {room}: {self.pool.num_pages} pages of {self.pool.page_size}"
            )

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError as ``check`` does."""
        self.check(request)
        self._arrivals += 1
        request.order = (self._steps + self.patience * request.priority, self._arrivals)
        self._unfinished[request.id] = request
        _insert(self._waiting, request)

    def abort(self, request_id: str) -> Request | None:
        """End a request now; None if there is none of this id."""
        request = self._unfinished.get(request_id)
        if request is not None:
            self._finish(request)
        return request

    def clear(self) -> None:
        """End all requests and release all pages, also after a change of them that was interrupted."""
        for request in self._unfinished.values():
            request.finished = True
        self._running, self._waiting, self._unfinished = [], [], {}
        self.pool.release_all()
        self.host_pool.release_all()

    def schedule(self) -> Step | None:
        """The next step; None if there is nothing that could be computed now."""
        step = Step(left=self.max_tokens)
        if self.apart:
            self._continue(step, generating=False)
            if not step.work:
                self._admit(step)
            if not step.work:
                self._continue(step, generating=True)
        else:
            self._continue(step, generating=True)
            self._continue(step, generating=False)
            while self._admit(step):
                pass
        if not step.work and not step.swap_out:
            return None
        step.work.sort(key=lambda work: not work.samples or work.count > 1 + work.drafts)
        self._steps += 1
        return step

    def update(
        self,
        step: Step,
        tokens: Mapping[str, Sequence[int]],
        stopped: Collection[str] = (),
        failed: Collection[str] = (),
    ) -> list[Request]:
        """Tell what a step gave; steps in the order in which they were scheduled.

        Args:
            tokens: by id of each request that sampled: its new tokens, more than one where drafts were right.
            stopped: ids of requests that are to end with these tokens.
            failed: ids of requests that are to end as well, with these tokens or none, and whose pages nobody shares:
                what was computed of them is wrong.

        Returns:
            The requests that ended.
        """
        ended = []
        for work in step.work:
            request = work.request
            if request.finished:
                continue
            self.statistics.computed_tokens += work.count
            fails = request.id in failed
            if work.samples:
                new = list(tokens[request.id])
                least, most = 0 if fails else 1, 1 + work.drafts
                if not least <= len(new) <= most:
                    raise ValueError(f"tokens of request {request.id!r} must be {least} to {most}, got {len(new)}")
                self.statistics.generated_tokens += len(new)
                self.statistics.draft_tokens += work.drafts
                self.statistics.accepted_tokens += max(len(new) - 1, 0)
                request.tokens += new[: request.most_tokens - len(request.tokens)]
                request.pending -= 1
                if request.verifying:
                    request.computed, request.verifying = work.start + len(new), False
            if fails:
                self.pool.forget(request.pages)
            elif request.pages and self.prefix_cache:
                self._seal(request)
            if work.samples and (len(request.tokens) >= request.most_tokens or fails or request.id in stopped):
                self._finish(request)
                ended.append(request)
        return ended

    def _continue(self, step: Step, generating: bool) -> None:
        """Add running requests that generate, or those whose prompt is not done."""
        for request in list(self._running):
            if (step.gave_way and request not in self._running) or self._generates(request) != generating:
                continue
            count = min(self._wanted(request), step.left)
            if count > 0 and self._make_room(request, request.computed + count, step):
                self._assign(request, count, step)
                if self.apart and not generating:
                    return

    def _generates(self, request: Request) -> bool:
        missing = request.length - request.computed
        return missing == 1 or (self.apart and request.computed >= len(request.prompt))

    def _wanted(self, request: Request) -> int:
        """Tokens that could be computed of a running request."""
        missing = request.length - request.computed
        to_generate = request.most_tokens - request.length
        ends_under_way = to_generate < 1 and missing <= 1
        if ends_under_way or request.verifying:
            return 0
        if missing == 1 and request.drafts and not request.pending:
            return 1 + min(len(request.drafts), to_generate - 1)
        if self.apart and missing > 1:
            return max(len(request.prompt) - request.computed, 1)
        return missing

    def _assign(self, request: Request, count: int, step: Step) -> None:
        """Give the step ``count`` tokens of a request that has the pages for them."""
        missing = request.length - request.computed
        samples, drafts = count >= missing, max(count - missing, 0)
        step.add(Work(request, request.computed, count, drafts, samples))
        request.computed += count
        request.pending += samples
        request.verifying = drafts > 0

    def _make_room(self, request: Request, tokens: int, step: Step) -> bool:
        """Whether a running request has pages for so many tokens now.

        One that finds nobody to give way keeps what it has and waits: those who hold the pages are in this step, or
        before it in order.
        """
        missing = self._missing_pages(request, tokens)
        while (pages := self.pool.allocate(missing)) is None:
            scheduled = {id(work.request) for work in step.work}
            later = [other for other in self._running if other.order > request.order and id(other) not in scheduled]
            if not later:
                return False
            self._give_way(later[-1], step)
        request.pages += pages
        return True

    def _missing_pages(self, request: Request, tokens: int) -> int:
        return max(-(-tokens // self.pool.page_size) - len(request.pages), 0)

    def _give_way(self, request: Request, step: Step) -> None:
        step.gave_way = True
        host = self.host_pool.allocate(len(request.pages))
        if host is not None:
            step.swap_out += zip(request.pages, host, strict=True)
            request.host_pages = host
            self.statistics.swapped += 1
        else:
            request.computed, request.sealed, request.verifying = 0, 0, False
            self.statistics.recomputed += 1
        self._drop_pages(request)
        self._running.remove(request)
        _insert(self._waiting, request)

    def _admit(self, step: Step) -> bool:
        """Let the first that waits run, if there is room for some of its tokens; whether it does."""
        if not self._waiting or len(self._running) >= self.max_requests or step.left < 1 or step.gave_way:
            return False
        request = self._waiting[0]
        if request.pending:
            return False  # its last token is not known yet
        hosted = request.host_pages
        if not hosted:
            request.pages = self._cached_pages(request)
            request.shared = len(request.pages) * self.pool.page_size
            request.computed = max(request.shared - self.repeats, 0)
        count = min(self._wanted(request), step.left)
        more = self.pool.allocate(max(self._missing_pages(request, request.computed + count), len(hosted)))
        if more is None:
            self._drop_pages(request)
            request.computed = request.computed if hosted else 0
            return False
        if hosted:
            step.swap_in += zip(hosted, more, strict=False)
            self._drop_host_pages(request)
        else:
            request.cached += request.computed
            request.sealed, request.chain = 0, self.pool.root(request.salt)
            self.statistics.cached_tokens += request.computed
        request.pages += more
        _insert(self._running, self._waiting.pop(0))
        self._assign(request, count, step)
        return True

    def _cached_pages(self, request: Request) -> list[int]:
        """Pages that hold the start of a request already, referenced for it; never all its tokens."""
        if not self.prefix_cache:
            return []
        found = self.pool.match(request.tokens[: request.length - 1], request.salt)
        while self.apart and len(found) * self.pool.page_size % self.max_tokens:
            found.pop()
        self.pool.take(found)
        return found

    def _seal(self, request: Request) -> None:
        """Offer the pages that are full of known, computed tokens to the prefix cache."""
        size, prompt = self.pool.page_size, len(request.prompt)
        known = prompt - prompt % self.max_tokens if self.apart else len(request.tokens)
        full = min(request.computed, known) // size
        while request.sealed < min(full, len(request.pages)):
            begin = request.sealed * size
            chunk = request.tokens[begin : begin + size]
            request.chain = self.pool.seal(request.pages[request.sealed], request.chain, chunk)
            request.sealed += 1

    def _finish(self, request: Request) -> None:
        request.finished = True
        del self._unfinished[request.id]
        self._drop_pages(request)
        self._drop_host_pages(request)
        for queue in (self._running, self._waiting):
            if request in queue:
                queue.remove(request)

    def _drop_pages(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages = []

    def _drop_host_pages(self, request: Request) -> None:
        self.host_pool.release(request.host_pages)
        request.host_pages = []


def _insert(queue: list[Request], request: Request) -> None:
    """Keep the queue in order."""
    bisect.insort(queue, request, key=lambda one: one.order)
