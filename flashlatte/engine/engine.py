"""``Engine``: requests in, tokens out."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from flashlatte.engine.batch import EngineLimits
from flashlatte.engine.model_factory import create_model
from flashlatte.engine.outputs import Output, progress_bar
from flashlatte.engine.pages import PagePool
from flashlatte.engine.request import Request
from flashlatte.engine.runner import Runner, Sampled
from flashlatte.engine.sampling import SamplingParams
from flashlatte.engine.scheduler import Scheduler
from flashlatte.engine.validation import Prompt, check_options, new_request, with_sampling
from flashlatte.runtime import checks

T = TypeVar("T")


class Engine(contextlib.AbstractContextManager["Engine"]):
    """Continuous batching over a paged cache with prefix sharing, for one model on one device, or on several ranks.

    Of several ranks, one process each, rank 0 takes the requests and closes it at the end, as ``with engine:`` does;
    the others ``follow``.

    Args:
        model: a ``Model``, a transformers model, or a checkpoint's directory.
        cache_format: of the pages; by default plain rows in the model's dtype.
        num_pages: of the cache; by default what fits 0.8 of a GPU's free memory, or 16,384 tokens on a CPU.
        page_size: tokens in a page, on each rank; by default 64, or for DeepSeek-V4 those of 64 groups.
        host_pages: pages of a copy on the host, to which requests that give way are swapped; 0: computed again.
        max_num_batched_tokens: of a step. max_num_seqs: that run at a time. starvation_limit: see ``Scheduler``.
        enable_prefix_caching: whether requests that begin alike share pages.
        drafts: tokens to guess from the request's own text and verify in one step (prompt lookup); 0: none.
        graphs: whether decode steps run as CUDA graphs (on a GPU).
        tokenizer: with ``decode``, for stops that are texts, and ``encode``, for prompts that are.
        tensor_parallel: ranks that heads and MLPs are divided over: as many as ``torchrun`` started processes.
        context_parallel: ranks that keys are divided over, a divisor of ``tensor_parallel``; 1: each stores all.

    Raises:
        TypeError, ValueError: a limit below 1, an unknown or unfit cache format, a cache that does not fit the memory;
            a tokenizer that is none; ranks that the processes or heads do not go into, or that differ in the engine.
        RuntimeError: a rank that does not come; in ``step``, ``follow`` and ``close`` one that failed, with its reason.
    """

    def __init__(
        self,
        model: Any,
        *,
        cache_format: str | None = None,
        num_pages: int | None = None,
        page_size: int | None = None,
        swap_space: int = 0,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 64,
        starvation_limit: int = 64,
        enable_prefix_caching: bool = True,
        num_speculative_tokens: int = 0,
        cuda_graphs: bool = True,
        tokenizer: Any = None,
        tensor_parallel: int = 1,
        context_parallel: int = 1,
    ) -> None:
        options = {
            "cache_format": cache_format,
            "num_pages": num_pages,
            "page_size": page_size,
            "cuda_graphs": cuda_graphs,
        }
        options |= {
            "swap_space": swap_space,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
            "num_speculative_tokens": num_speculative_tokens,
        }
        self.model = create_model(model, tensor_parallel, context_parallel, options)
        self.ranks = self.model.ranks
        with self.ranks.failing_together():
            self.cache_format = self.model.plain_format if cache_format is None else cache_format
            page_size = checks.positive_int("page_size", self.model.page_size if page_size is None else page_size)
            if num_pages is None:
                num_pages = self.model.default_pages(self.cache_format, page_size)
            limits = EngineLimits(
                num_pages, page_size, swap_space, max_num_batched_tokens, max_num_seqs, num_speculative_tokens
            )
            check_options(
                self.model,
                limits,
                tokenizer,
                starvation_limit=starvation_limit,
                enable_prefix_caching=enable_prefix_caching,
                cuda_graphs=cuda_graphs,
            )
            self.runner = Runner(self.model, self.cache_format, limits, cuda_graphs=cuda_graphs)
        facts = {"model": self.model.config, "dtype": self.model.dtype, "cache_format": self.cache_format}
        self.ranks.agree(facts | dataclasses.asdict(limits) | {"cuda_graphs": cuda_graphs})
        self.pool = PagePool(num_pages, page_size * self.ranks.keys_over)
        self.scheduler = Scheduler(
            self.pool,
            host_pool=PagePool(swap_space, self.pool.page_size),
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            starvation_limit=starvation_limit,
            enable_prefix_caching=enable_prefix_caching,
            prefix_overlap=self.model.prefix_overlap,
            batch_invariant=self.model.batch_invariant,
        )
        self.num_speculative_tokens, self.tokenizer = num_speculative_tokens, tokenizer
        self._live: dict[str, tuple[Request, Output]] = {}
        self._in_flight: Sampled | None = None
        # By id(): outputs that changed since ``step`` returned them, and those whose owner wants no more of them.
        self._undelivered: dict[int, Output] = {}
        self._dropped: dict[int, Output] = {}
        # Whether a change of requests and pages is being made, and whether one was interrupted.
        self._changing = self._interrupted = False
        self._taken, self._seconds = 0, 0.0

    def add(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> str:
        """Queue a request; returns its id. ``priority`` and ``cache_salt`` as in ``Request``.

        Raises:
            TypeError, ValueError: a prompt that is empty, or with tokens that the model does not have; more tokens
                than the model or the cache has room for; an id that is in use.
        """
        request, output = self._new(prompt, sampling, id, priority, cache_salt)
        self._change(self._queue, request, output)
        return output.id

    def step(self) -> list[Output]:
        """Run a step; returns the requests that it gave tokens to, or that ended.

        So it does of steps that ``stream`` and ``generate`` ran meanwhile for others. Without drafts the next step is
        planned and launched before the tokens of the last are waited for. A step that raises or is interrupted, in
        whichever of the calls, aborts all requests: what it had planned is not in the cache.
        """
        self._step()
        changed = list(self._undelivered.values())
        for output in changed:
            output.new, output.told = output.tokens[output.told :], len(output.tokens)
        self._undelivered = {}
        return changed

    def abort(self, request_id: str) -> Output:
        """End a request now; one that has ended, of which ``step`` is still to tell, stays as it is.

        Raises:
            TypeError, ValueError: an id that is no text, or of no unfinished request.
        """
        checks.instance("request_id", request_id, str)
        output = self._change(self._abort, request_id)
        if output is None:
            output = next((one for one in self._undelivered.values() if one.id == request_id), None)
        if output is None:
            raise ValueError(f"request_id must be of an unfinished request, got {request_id!r}")
        self._undelivered.pop(id(output), None)
        return output

    @property
    def unfinished(self) -> int:
        """Requests that have not ended, or of whose end ``step`` is still to tell."""
        self._recover()
        return len(self.scheduler) + sum(output.finish_reason is not None for output in self._undelivered.values())

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Output]:
        """Generate for all prompts; outputs in their order. ``progress`` shows a bar (needs rich)."""
        asked, outputs = with_sampling(prompts, sampling), list[Output]()
        with self._aborting(outputs), progress_bar(len(asked), progress) as show:
            for prompt, one in asked:
                self._own(prompt, one, outputs)
            while (done := sum(output.finish_reason is not None for output in outputs)) < len(outputs):
                show(done)
                self._step()
            show(done)
        return outputs

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[int]:
        """The tokens, as they come, of a request that is added now; other requests go on beside it.

        Raises:
            TypeError, ValueError: as ``add``.
            RuntimeError: behind the last token of a request that ended by "error".
        """
        tokens = self._tokens_of(prompt, sampling)
        next(tokens)
        return tokens

    def reset_prefix_cache(self) -> None:
        """Share no page computed before, as after a change of the model's weights. Requests under way keep theirs."""
        self._check_leads("reset_prefix_cache")
        self.pool.invalidate_all()

    def statistics(self) -> dict[str, float]:
        """Counts since the start.

        ``generated_tokens``, and ``tokens_per_second`` of the ``seconds`` in steps; ``computed_tokens``, those of
        prompts too, and ``cached_tokens`` that the prefix cache had instead; ``draft_tokens`` and ``accepted_tokens``;
        requests ``swapped`` and ``recomputed`` when pages ran out; ``pages_in_use`` of ``pages``.
        """
        counts = dataclasses.asdict(self.scheduler.statistics)
        seconds, pages = self._seconds, {"pages": self.pool.num_pages, "pages_in_use": self.pool.in_use}
        rate = counts["generated_tokens"] / seconds if seconds else 0.0
        return counts | pages | {"seconds": seconds, "tokens_per_second": rate}

    @property
    def leads(self) -> bool:
        """Whether this process takes requests: rank 0, or the only one."""
        return self.ranks.leads

    def follow(self) -> None:
        """Compute this rank's part of what rank 0 schedules, until that closes its engine. ValueError on rank 0."""
        self.runner.follow()

    def close(self) -> None:
        """Let the other ranks go; of one process, nothing."""
        self.ranks.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_leads(self, call: str) -> None:
        """Raise ValueError where ``call`` would do nothing, or schedule what nobody follows."""
        if not self.leads or self.ranks.closed:
            raise ValueError(f"{call}() is for rank 0 of an engine that is not closed; other ranks follow()")

    def _new(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> tuple[Request, Output]:
        """A request that can be queued, and its output."""
        self._check_leads("add")
        self._recover()
        if id is None:
            id = next(name for one in itertools.count(self._taken) if (name := f"request-{one}") not in self._live)
        request = new_request(id, self._taken, prompt, sampling, priority, cache_salt, self.model, self.tokenizer)
        self.scheduler.check(request)
        return request, Output(id, request.prompt, request.sampling, self.tokenizer)

    def _own(self, prompt: Prompt, sampling: SamplingParams | None, outputs: list[Output]) -> Output:
        """The output of a new request, which ``step`` does not return; added to ``outputs`` before it is queued."""
        request, output = self._new(prompt, sampling)
        output.told = None
        outputs.append(output)
        self._change(self._queue, request, output)
        return output

    def _tokens_of(self, prompt: Prompt, sampling: SamplingParams | None) -> Iterator[int]:
        """The tokens of a new request, after a first item that is none: a generator that has begun aborts the request
        when it is dropped.
        """
        given, outputs = 0, list[Output]()
        with self._aborting(outputs):
            output = self._own(prompt, sampling, outputs)
            yield -1
            # Steps that others run in between give tokens to this request too.
            while given < len(output.tokens) or output.finish_reason is None:
                if given == len(output.tokens):
                    self._step()
                new = output.tokens[given:]
                given += len(new)
                yield from new
        if output.error is not None:
            raise RuntimeError(f"request {output.id!r} failed: {output.error}")

    @contextlib.contextmanager
    def _aborting(self, outputs: Sequence[Output]) -> Iterator[None]:
        """Those that have not ended within, also by an error, are aborted."""
        try:
            yield
        finally:
            self._dropped.update((id(output), output) for output in outputs if output.finish_reason is None)
            # The garbage collector may drop a stream while requests change: then the step aborts it.
            if not self._changing:
                self._abort_dropped()

    def _abort_dropped(self) -> None:
        for key, output in list(self._dropped.items()):
            if self._live.get(output.id, (None, None))[1] is output:
                self._change(self._abort, output.id)
            self._dropped.pop(key, None)

    def _step(self) -> None:
        self._check_leads("step")
        begin = time.perf_counter()
        try:
            self._change(self._launch_and_collect)
        finally:
            self._abort_dropped()
        self._seconds += time.perf_counter() - begin

    def _change(self, change: Callable[..., T], *arguments: Any) -> T:
        """Call what changes requests and their pages together; if it raises, abort all requests.

        So no half-made change stays, wherever an interrupt (KeyboardInterrupt, MemoryError) arrives. If it interrupts
        the recovery, the next call starts with the recovery.
        """
        self._recover()
        try:
            self._changing = True
            result = change(*arguments)
            self._changing = False
        except BaseException:
            self._interrupted = True
            self._recover()
            raise
        return result

    def _recover(self) -> None:
        """Abort all requests if a change of them was interrupted."""
        if not self._interrupted:
            return
        self._in_flight = None
        self.scheduler.clear()
        self.runner.release_all()
        for request, output in self._live.values():
            if output.finish_reason is None:
                self._undelivered.pop(id(output), None)
                output.finish_reason, output.cached_tokens = "abort", request.num_cached_tokens
        self._live = {}
        self._changing = self._interrupted = False

    def _queue(self, request: Request, output: Output) -> None:
        self.scheduler.add(request)
        self._taken += 1
        self._live[request.id] = request, output

    def _abort(self, request_id: str) -> Output | None:
        request = self.scheduler.abort(request_id)
        return None if request is None else self._end(request, "abort")

    def _launch_and_collect(self) -> None:
        """Launch the next step, and take the tokens of the last one. RuntimeError if there is neither."""
        waits = self._in_flight is not None
        if self.num_speculative_tokens:
            self._collect()
        step = self.scheduler.schedule()
        if step is None and not waits and len(self.scheduler):
            raise RuntimeError(
                f"none of {len(self.scheduler)} unfinished requests can be scheduled, with {self.pool.available} of "
                f"{self.pool.num_pages} pages free"
            )
        launched = None if step is None else self.runner.run(step)
        self._collect()
        self._in_flight = launched

    def _collect(self) -> None:
        """Wait for the tokens of the step in flight and add them to the outputs."""
        sampled, self._in_flight = self._in_flight, None
        if sampled is None:
            return
        accepted, reasons = dict[str, list[int]](), dict[str, str]()
        for one, tokens, logprobs in sampled.wait():
            if (request := one.request).finished:
                continue
            _, output = self._live[request.id]
            if (reason := output.extend(tokens, logprobs, request.draft_tokens[: one.num_drafts])) is not None:
                reasons[request.id] = reason
            accepted[request.id] = output.new
            if output.told is not None:
                self._undelivered[id(output)] = output
        failed = [name for name, reason in reasons.items() if reason == "error"]
        for request in self.scheduler.update(sampled.step, accepted, reasons.keys(), failed):
            self._end(request, reasons.get(request.id, "length"))
        if self.num_speculative_tokens:
            for request in [one.request for one in sampled.step.scheduled if one.samples]:
                request.draft_tokens = request.prompt_lookup.propose(request.tokens, self.num_speculative_tokens)

    def _end(self, request: Request, reason: str) -> Output:
        self.runner.release(request)
        _, output = self._live[request.id]
        output.finish_reason, output.cached_tokens = reason, request.num_cached_tokens
        del self._live[request.id]
        return output
