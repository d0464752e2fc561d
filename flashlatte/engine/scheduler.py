"""Chooses which tokens of which requests the next step computes, and in which pages. Integers and lists only.

Continuous batching under a token budget: every running request that generates gets its token first, and prompts share
the rest, in chunks. When pages run out, the latest request is preempted: its pages are swapped out to the host, or
recomputed later. A step that preempts a request admits no other.

Requests run in the order of ``arrival + starvation_limit * priority``, where the arrival is the number of steps
scheduled before it. A lower priority runs first, but a waiting request eventually precedes all later ones, and the
first request in order can always take the pages of the others. So there is no starvation and no deadlock.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from flashlatte.engine.pages import PagePool
from flashlatte.engine.request import Request, ScheduledRequest, Step
from flashlatte.engine.states import NoStates, StateSlots


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

    ``schedule`` can be called again before ``update`` has processed the last step, so that the host plans while the
    device computes. A request whose draft tokens are being verified waits for its ``update``.

    Args:
        pool: pages of the cache.
        host_pool: pages of its copy on the host; None: preempted requests are recomputed.
        num_snapshots: snapshots of the states of linear attention; None: the model has no such layers.
        max_num_batched_tokens: tokens of a step.
        max_num_seqs: requests that run at a time.
        starvation_limit: steps by which a priority that is lower by one moves a request forward.
        enable_prefix_caching: whether requests with the same beginning share pages.
        prefix_overlap: tokens at the end of a shared prefix that are recomputed (``PagedModel.prefix_overlap``).
        batch_invariant: whether the steps of a request depend on that request alone. Its prompt is then computed in
            chunks of ``max_num_batched_tokens``, each in a step of its own, before other requests generate. Only pages
            of whole chunks are shared, and generated tokens are computed one by one, also when they are recomputed.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        host_pool: PagePool | None = None,
        num_snapshots: int | None = None,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 64,
        starvation_limit: int = 64,
        enable_prefix_caching: bool = True,
        prefix_overlap: int = 0,
        batch_invariant: bool = False,
    ) -> None:
        self.pool, self.host_pool = pool, host_pool or PagePool(0, pool.page_size)
        self.states = NoStates()
        if num_snapshots is not None:
            num_host = min(self.host_pool.num_pages, max_num_seqs)
            self.states = StateSlots(pool.page_size, max_num_seqs, num_snapshots, num_host)
        self.max_num_batched_tokens, self.max_num_seqs = max_num_batched_tokens, max_num_seqs
        self.starvation_limit = starvation_limit
        self.enable_prefix_caching, self.prefix_overlap = enable_prefix_caching, prefix_overlap
        self.batch_invariant = batch_invariant
        self.statistics = Statistics()
        self._running, self._waiting = list[Request](), list[Request]()
        self._unfinished: dict[str, Request] = {}
        self._steps = self._arrivals = 0

    def __len__(self) -> int:
        """Number of unfinished requests."""
        return len(self._unfinished)

    @property
    def num_running(self) -> int:
        """Number of requests that have pages."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for their first step, or for their next one after preemption."""
        return len(self._waiting)

    def check(self, request: Request) -> None:
        """Raise ValueError for an id that is in use, or more tokens than the cache can hold."""
        if request.id in self._unfinished:
            raise ValueError(f"request_id must be unique among unfinished requests, got {request.id!r} again")
        room = self.pool.num_pages * self.pool.page_size
        needed = request.max_length - 1  # the last token is never stored
        if needed > room:
            raise ValueError(
                f"prompt and max_tokens of request {request.id!r} must fit the cache, got {needed} tokens, and it "
                f"holds {room}: {self.pool.num_pages} pages of {self.pool.page_size}"
            )

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError as ``check`` does."""
        self.check(request)
        self._arrivals += 1
        request.order = (self._steps + self.starvation_limit * request.priority, self._arrivals)
        self._unfinished[request.id] = request
        _insert(self._waiting, request)

    def abort(self, request_id: str) -> Request | None:
        """End a request now. Returns it, or None if no unfinished request has this id."""
        request = self._unfinished.get(request_id)
        if request is not None:
            self._finish(request)
        return request

    def clear(self) -> None:
        """End all requests and release all pages, also after an interrupted change."""
        for request in self._unfinished.values():
            request.finished = True
        self._running, self._waiting, self._unfinished = [], [], {}
        self.pool.release_all()
        self.host_pool.release_all()
        self.states.release_all()

    def schedule(self) -> Step | None:
        """The next step; None if nothing can be computed now."""
        step = Step(token_budget=self.max_num_batched_tokens)
        if self.batch_invariant:
            self._schedule_running(step, generating=False)
            if not step.scheduled:
                self._admit(step)
            if not step.scheduled:
                self._schedule_running(step, generating=True)
        else:
            self._schedule_running(step, generating=True)
            self._schedule_running(step, generating=False)
            while self._admit(step):
                pass
        if not step.scheduled and not step.swap_out:
            return None
        step.scheduled.sort(key=lambda one: not one.samples or one.count > 1 + one.num_drafts)
        self._steps += 1
        return step

    def update(
        self,
        step: Step,
        tokens: Mapping[str, Sequence[int]],
        stopped: Collection[str] = (),
        failed: Collection[str] = (),
    ) -> list[Request]:
        """Process the sampled tokens of a step. Steps are passed in the order in which they were scheduled.

        Args:
            tokens: new tokens by id of each request that sampled; several where draft tokens were accepted.
            stopped: ids of requests that end with these tokens.
            failed: ids of requests that end, with or without tokens, because their logits are invalid. Their pages are
                removed from the prefix cache.

        Returns:
            The requests that ended.
        """
        ended = []
        for one in step.scheduled:
            request = one.request
            if request.finished:
                continue
            self.statistics.computed_tokens += one.count
            fails = request.id in failed
            if one.samples:
                new = list(tokens[request.id])
                minimum, maximum = 0 if fails else 1, 1 + one.num_drafts
                if not minimum <= len(new) <= maximum:
                    raise ValueError(f"request {request.id!r} must get {minimum} to {maximum} tokens, got {len(new)}")
                self.statistics.generated_tokens += len(new)
                self.statistics.draft_tokens += one.num_drafts
                self.statistics.accepted_tokens += max(len(new) - 1, 0)
                request.tokens += new[: request.max_length - len(request.tokens)]
                request.pending -= 1
                if request.verifying:
                    request.num_computed_tokens, request.verifying = one.start + len(new), False
            if fails:
                self.pool.unregister(request.pages)
                self.states.unregister(request)
            elif request.pages and self.enable_prefix_caching:
                self._register_pages(request)
            if one.samples and (len(request.tokens) >= request.max_length or fails or request.id in stopped):
                self._finish(request)
                ended.append(request)
        return ended

    def _schedule_running(self, step: Step, generating: bool) -> None:
        """Add the running requests that generate, or those whose prompt is incomplete."""
        for request in list(self._running):
            if (step.preempted and request not in self._running) or self._generates(request) != generating:
                continue
            count = min(self._num_schedulable(request), step.token_budget)
            if count > 0 and self._allocate_for(request, request.num_computed_tokens + count, step):
                self._add_to(request, count, step)
                if self.batch_invariant and not generating:
                    return

    def _generates(self, request: Request) -> bool:
        missing = request.length - request.num_computed_tokens
        return missing == 1 or (self.batch_invariant and request.num_computed_tokens >= len(request.prompt))

    def _num_schedulable(self, request: Request) -> int:
        """Number of tokens of a running request that can be computed now."""
        missing = request.length - request.num_computed_tokens
        to_generate = request.max_length - request.length
        ends_in_flight = to_generate < 1 and missing <= 1
        if ends_in_flight or request.verifying:
            return 0
        if missing == 1 and request.draft_tokens and not request.pending:
            return 1 + min(len(request.draft_tokens), to_generate - 1)
        if self.batch_invariant and missing > 1:
            return max(len(request.prompt) - request.num_computed_tokens, 1)
        return missing

    def _add_to(self, request: Request, count: int, step: Step) -> None:
        """Add ``count`` tokens of a request, which has the pages for them, to the step."""
        missing = request.length - request.num_computed_tokens
        samples, drafts = count >= missing, max(count - missing, 0)
        begin, request.num_computed_tokens = request.num_computed_tokens, request.num_computed_tokens + count
        num_scored = 0
        if request.scores_prompt:
            end = min(begin + count + 1, len(request.prompt))
            num_scored = max(end - request.num_scored_tokens, 0)
            request.num_scored_tokens += num_scored
        snapshots = self.states.take_snapshots(request, begin, begin + count)
        step.add(ScheduledRequest(request, begin, count, drafts, samples, num_scored, snapshots))
        request.pending += samples
        request.verifying = drafts > 0

    def _allocate_for(self, request: Request, tokens: int, step: Step) -> bool:
        """Allocate the pages of a running request's first ``tokens`` tokens, preempting later requests if needed.

        Returns False if none can be preempted: all other pages belong to requests of this step or to earlier ones. The
        request then keeps its pages and waits.
        """
        missing = self._missing_pages(request, tokens)
        while (pages := self.pool.allocate(missing)) is None:
            scheduled = {id(one.request) for one in step.scheduled}
            later = [other for other in self._running if other.order > request.order and id(other) not in scheduled]
            if not later:
                return False
            self._preempt(later[-1], step)
        request.pages += pages
        return True

    def _missing_pages(self, request: Request, tokens: int) -> int:
        return max(-(-tokens // self.pool.page_size) - len(request.pages), 0)

    def _preempt(self, request: Request, step: Step) -> None:
        step.preempted = True
        host = self.host_pool.allocate(len(request.pages)) if self.states.can_swap_out() else None
        if host is not None:
            self.states.swap_out(request, step)
            step.swap_out += zip(request.pages, host, strict=True)
            request.host_pages = host
            self.statistics.swapped += 1
        else:
            self.states.release(request)
            request.num_computed_tokens, request.num_registered_pages, request.verifying = 0, 0, False
            self.statistics.recomputed += 1
        self._release_pages(request)
        self._running.remove(request)
        _insert(self._waiting, request)

    def _admit(self, step: Step) -> bool:
        """Start the first waiting request if step and cache have room for some of its tokens. Returns whether it
        started."""
        if not self._waiting or len(self._running) >= self.max_num_seqs or step.token_budget < 1 or step.preempted:
            return False
        request = self._waiting[0]
        if request.pending:
            return False  # the host has not received its last token
        host_pages = request.host_pages
        if not host_pages:
            request.pages = self._acquire_cached_pages(request)
            request.num_shared_tokens = len(request.pages) * self.pool.page_size
            request.num_computed_tokens = max(request.num_shared_tokens - self.prefix_overlap, 0)
        count = min(self._num_schedulable(request), step.token_budget)
        new_pages = self.pool.allocate(
            max(self._missing_pages(request, request.num_computed_tokens + count), len(host_pages))
        )
        if new_pages is None:
            self._release_pages(request)
            request.num_computed_tokens = request.num_computed_tokens if host_pages else 0
            return False
        if host_pages:
            step.swap_in += zip(host_pages, new_pages, strict=False)
            self._release_host_pages(request)
        else:
            if request.num_cached_tokens is None:
                request.num_cached_tokens = request.num_computed_tokens
            request.num_registered_pages, request.page_hash = 0, self.pool.root_hash(request.cache_salt)
            self.statistics.cached_tokens += request.num_computed_tokens
        request.pages += new_pages
        self.states.start(request, step)
        _insert(self._running, self._waiting.pop(0))
        self._add_to(request, count, step)
        return True

    def _acquire_cached_pages(self, request: Request) -> list[int]:
        """Acquire the registered pages of a request's longest cached prefix; at least one token remains to compute."""
        # Tokens from the prefix cache have no logits.
        if not self.enable_prefix_caching or (
            request.scores_prompt and request.num_scored_tokens < len(request.prompt)
        ):
            found = []
        else:
            found = self.pool.match(request.tokens[: request.length - 1], request.cache_salt)
        found = found[: self.states.usable_pages(request, self.pool.keys(found))]
        while self.batch_invariant and len(found) * self.pool.page_size % self.max_num_batched_tokens:
            found.pop()
        self.pool.acquire(found)
        return found

    def _register_pages(self, request: Request) -> None:
        """Register full pages whose tokens are computed and known to the host."""
        size, prompt = self.pool.page_size, len(request.prompt)
        known = prompt - prompt % self.max_num_batched_tokens if self.batch_invariant else len(request.tokens)
        full = min(request.num_computed_tokens, known) // size
        while request.num_registered_pages < min(full, len(request.pages)):
            begin = request.num_registered_pages * size
            chunk = request.tokens[begin : begin + size]
            request.page_hash = self.pool.register(
                request.pages[request.num_registered_pages], request.page_hash, chunk
            )
            request.num_registered_pages += 1
            self.states.register(request, begin + size, request.page_hash)

    def _finish(self, request: Request) -> None:
        request.finished = True
        del self._unfinished[request.id]
        self._release_pages(request)
        self._release_host_pages(request)
        self.states.release(request)
        for queue in (self._running, self._waiting):
            if request in queue:
                queue.remove(request)

    def _release_pages(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages = []

    def _release_host_pages(self, request: Request) -> None:
        self.host_pool.release(request.host_pages)
        request.host_pages = []


def _insert(queue: list[Request], request: Request) -> None:
    """Insert into a sorted queue."""
    bisect.insort(queue, request, key=lambda one: one.order)
