"""``Engine``: requests in, tokens out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from flashlatte.engine.batch import EngineLimits
from flashlatte.engine.live_requests import LiveRequests
from flashlatte.engine.loading import tokenizer_of
from flashlatte.engine.model_factory import create_model
from flashlatte.engine.outputs import CompletionOutput, RequestFailed, RequestOutput, progress_bar
from flashlatte.engine.pages import PagePool
from flashlatte.engine.request import Request
from flashlatte.engine.runner import Runner, StepResult
from flashlatte.engine.sampling_params import SamplingParams
from flashlatte.engine.scheduler import Scheduler
from flashlatte.engine.validation import Prompt, check_options, new_requests, pair_with_sampling
from flashlatte.runtime import checks

P = ParamSpec("P")
T = TypeVar("T")


def _one_thread(method: Callable[Concatenate[Engine, P], T]) -> Callable[Concatenate[Engine, P], T]:
    """Decorate a method that runs in one thread at a time."""

    @functools.wraps(method)
    def run(self: Engine, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **kwargs)

    return run


class Engine(contextlib.AbstractContextManager["Engine"]):
    """Continuous batching over a paged cache with prefix sharing, for one model on one device or on several ranks.

    With several ranks, one process each, rank 0 takes the requests and closes the engine at the end, as ``with
    engine:`` does. The others call ``follow``.

    Any thread may call it. Steps run one after another, each for the requests of all threads.

    Args:
        model: a checkpoint's directory, a transformers model, or a ``Model``.
        cache_format: format of the pages; default: unquantized rows in the model's dtype.
        num_pages: pages of the cache; default: 0.8 of a GPU's free memory, or 16,384 tokens on a CPU.
        page_size: tokens in a page, on each rank; default 64, for DeepSeek-V4 the tokens of 64 groups.
        swap_space: pages on the host for the pages of preempted requests; 0: these are recomputed.
        max_num_batched_tokens: maximum number of tokens in a step.
        max_num_seqs: maximum number of requests that run at a time.
        starvation_limit: steps by which a priority that is lower by one moves a request forward.
        enable_prefix_caching: whether requests with the same beginning share pages.
        num_speculative_tokens: draft tokens per step, proposed by prompt lookup and verified in one step.
        cuda_graphs: whether decode steps run as CUDA graphs (on a GPU).
        tokenizer: an object with ``decode``, for ``text`` and ``stop``, and ``encode``, for prompts that are strings.
            Default: the tokenizer of the checkpoint's directory, if it has a tokenizer.json.
        tensor_parallel: ranks that share heads and MLPs: the number of processes that ``torchrun`` started.
        context_parallel: ranks that share the keys, a divisor of ``tensor_parallel``; 1: each stores all keys.

    Raises:
        TypeError, ValueError: a limit below 1; a cache format that is unknown or does not fit the model; a cache larger
            than the memory; an invalid tokenizer; numbers of ranks that do not fit the processes or heads; ranks with
            different arguments.
        RuntimeError: a rank does not start; in ``step``, ``follow`` and ``close``: a rank failed, with its reason.
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
        sizes = {
            "swap_space": swap_space,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
            "num_speculative_tokens": num_speculative_tokens,
        }
        options = {"cache_format": cache_format, "num_pages": num_pages, "page_size": page_size, **sizes}
        options["cuda_graphs"] = cuda_graphs
        self.model = create_model(model, tensor_parallel, context_parallel, options)
        self.ranks = self.model.ranks
        with self.ranks.failing_together():
            self.cache_format = self.model.plain_format if cache_format is None else cache_format
            page_size = checks.positive_int("page_size", self.model.page_size if page_size is None else page_size)
            if tokenizer is None and self.ranks.is_leader:
                tokenizer = tokenizer_of(model)
            num_snapshots = max_num_seqs if enable_prefix_caching and self.model.has_states else 0
            limits = EngineLimits(
                1 if num_pages is None else num_pages, page_size, **sizes, num_snapshots=num_snapshots
            )
            check_options(
                self.model,
                limits,
                tokenizer,
                starvation_limit=starvation_limit,
                enable_prefix_caching=enable_prefix_caching,
                cuda_graphs=cuda_graphs,
            )
            if num_pages is None:
                num_pages = self.model.default_pages(self.cache_format, page_size, limits.num_state_slots)
                limits = dataclasses.replace(limits, num_pages=num_pages)
            self.runner = Runner(self.model, self.cache_format, limits, cuda_graphs=cuda_graphs)
        facts = {"model": self.model.config, "dtype": self.model.dtype, "cache_format": self.cache_format}
        self.ranks.agree(facts | dataclasses.asdict(limits) | {"cuda_graphs": cuda_graphs})
        self.pool = PagePool(limits.num_pages, page_size * self.ranks.kv_ranks)
        self.scheduler = Scheduler(
            self.pool,
            host_pool=PagePool(swap_space, self.pool.page_size),
            num_snapshots=limits.num_snapshots if self.model.has_states else None,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            starvation_limit=starvation_limit,
            enable_prefix_caching=enable_prefix_caching,
            prefix_overlap=self.model.prefix_overlap,
            batch_invariant=self.model.batch_invariant,
        )
        self.num_speculative_tokens, self.tokenizer = num_speculative_tokens, tokenizer
        self._live = LiveRequests()
        self._in_flight: StepResult | None = None
        # Outputs whose stream or batch was dropped, by id().
        self._dropped: dict[int, RequestOutput] = {}
        # Whether a change of requests and pages is being made, and whether one was interrupted.
        self._changing = self._interrupted = False
        self._num_requested, self._seconds = 0, 0.0
        self._lock = threading.RLock()

    @_one_thread
    def add(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> str:
        """Queue a request; returns its id. ``priority`` and ``cache_salt`` are those of ``Request``.

        Raises:
            TypeError, ValueError: a prompt that is empty, or has tokens that are not in the vocabulary; more tokens
                than the model or the cache supports; an id that is in use.
        """
        output, requests = self._new(prompt, sampling_params, request_id, priority, cache_salt)
        self._change(self._queue, output, requests)
        return output.request_id

    @_one_thread
    def step(self) -> list[RequestOutput]:
        """Run a step; returns the requests that got tokens or ended, also in steps that ``stream`` and ``generate`` ran
        since the last call.

        Without speculation the next step is planned and launched before the tokens of the last one arrive. A step that
        raises or is interrupted, in any of these calls, aborts all requests, because their planned tokens are not in
        the cache.
        """
        self._step()
        return self._live.deliver()

    @_one_thread
    def abort(self, request_id: str) -> RequestOutput:
        """End a request now. A request that has ended, and that ``step`` has not returned yet, is returned as it is.

        Raises:
            TypeError, ValueError: an id that is not a string, or of no unfinished request.
        """
        checks.instance("request_id", request_id, str)
        self._recover()
        output = next((one for one in self._live.outputs() if one.request_id == request_id), None)
        if output is not None:
            self._change(self._abort, output)
        undelivered = self._live.take_undelivered(request_id)
        if output is None and undelivered is None:
            raise ValueError(f"request_id must be of an unfinished request, got {request_id!r}")
        return output or undelivered  # type: ignore[return-value]

    @property
    @_one_thread
    def unfinished(self) -> int:
        """Number of requests that run, wait, or have ended and were not yet returned by ``step``."""
        self._recover()
        return len(self._live)

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate for all prompts; the results in their order. ``progress`` shows a bar (needs rich)."""
        pairs, outputs = pair_with_sampling(prompts, sampling_params), list[RequestOutput]()
        with self._aborting(outputs), progress_bar(len(pairs), progress) as show:
            for prompt, params in pairs:
                self._add_owned(prompt, params, outputs)
            while (done := self._num_finished(outputs)) < len(outputs):
                show(done)
                self._step()
            show(done)
        return outputs

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[int]:
        """The tokens of a new request as they are generated. Other requests continue meanwhile.

        Raises:
            TypeError, ValueError: as ``add``; ``n`` above 1.
            RequestFailed: a RuntimeError, after the last token of a request that ended with "error".
        """
        if isinstance(sampling_params, SamplingParams) and sampling_params.n != 1:
            raise ValueError(f"n must be 1 for stream, got {sampling_params.n}")
        tokens = self._stream(prompt, sampling_params)
        next(tokens)
        return tokens

    def reset_prefix_cache(self) -> None:
        """Stop sharing all pages computed so far, for example after the weights have changed. Unfinished requests keep
        their pages."""
        self._check_leads("reset_prefix_cache")
        self.pool.invalidate_all()

    def statistics(self) -> dict[str, float]:
        """Counts since the start.

        ``generated_tokens``, and ``tokens_per_second`` over the ``seconds`` spent in steps; ``computed_tokens``,
        including those of prompts, and ``cached_tokens`` from the prefix cache; ``draft_tokens`` and
        ``accepted_tokens``; requests ``swapped`` and ``recomputed`` when pages ran out; ``pages_in_use`` of ``pages``;
        outputs that are ``running`` and ``waiting`` now. Any thread may call it.
        """
        counts = dataclasses.asdict(self.scheduler.statistics)
        seconds, pages = self._seconds, {"pages": self.pool.num_pages, "pages_in_use": self.pool.in_use}
        rate = counts["generated_tokens"] / seconds if seconds else 0.0
        queues = {"running": self.scheduler.num_running, "waiting": self.scheduler.num_waiting}
        return counts | pages | queues | {"seconds": seconds, "tokens_per_second": rate}

    @property
    def leads(self) -> bool:
        """Whether this process takes requests: rank 0, or the only one."""
        return self.ranks.is_leader

    def follow(self) -> None:
        """Compute this rank's part of the steps of rank 0, until that closes the engine. ValueError on rank 0."""
        self.runner.follow()

    @_one_thread
    def close(self) -> None:
        """End ``follow`` on the other ranks; with one process, do nothing."""
        self.ranks.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_leads(self, call: str) -> None:
        """Raise ValueError on ranks other than 0, and after ``close``."""
        if not self.leads or self.ranks.closed:
            raise ValueError(f"{call}() is for rank 0 of an engine that is not closed; other ranks follow()")

    def _new(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> tuple[RequestOutput, list[Request]]:
        """The output of a new request, and the requests for the scheduler, one for each of its ``n`` outputs."""
        self._check_leads("add")
        self._recover()
        if request_id is None:
            request_id = self._live.unused_id(self._num_requested)
        requests = new_requests(
            request_id, self._num_requested, prompt, sampling_params, priority, cache_salt, self.model, self.tokenizer
        )
        self._live.check_unused(request_id)
        for request in requests:
            self.scheduler.check(request)
        return RequestOutput.of(request_id, prompt, requests, self.tokenizer), requests

    @_one_thread
    def _add_owned(
        self, prompt: Prompt, sampling_params: SamplingParams | None, outputs: list[RequestOutput]
    ) -> RequestOutput:
        """The output of a new request, which ``step`` does not return; added to ``outputs`` before it is queued."""
        output, requests = self._new(prompt, sampling_params)
        output.returned_by_step = False
        outputs.append(output)
        self._change(self._queue, output, requests)
        return output

    def _stream(self, prompt: Prompt, sampling_params: SamplingParams | None) -> Iterator[int]:
        """The tokens of a new request, after a first item that is not a token: a generator can abort its request when
        it is dropped only if it has started.
        """
        count, ended, outputs = 0, False, list[RequestOutput]()
        with self._aborting(outputs):
            output = self._add_owned(prompt, sampling_params, outputs)
            (completion,) = output.outputs
            yield -1
            while not ended:
                new, ended = self._tokens_after(count, completion)
                count += len(new)
                yield from new
                if not (new or ended):
                    self._step()
        if completion.error is not None:
            raise RequestFailed(f"request {output.request_id!r} failed: {completion.error}")

    @contextlib.contextmanager
    def _aborting(self, outputs: Sequence[RequestOutput]) -> Iterator[None]:
        """Abort the requests that have not ended at the end of the block, also after an error."""
        try:
            yield
        finally:
            self._dropped.update((id(output), output) for output in outputs if not output.finished)
            # The garbage collector may drop a stream while requests are being changed, also by another thread, for
            # which it must not wait; the next step aborts its request.
            if not self._changing and self._lock.acquire(blocking=False):
                try:
                    self._abort_dropped()
                finally:
                    self._lock.release()

    @_one_thread
    def _num_finished(self, outputs: Sequence[RequestOutput]) -> int:
        return sum(output.finished for output in outputs)

    @_one_thread
    def _tokens_after(self, count: int, completion: CompletionOutput) -> tuple[list[int], bool]:
        """The tokens after the first ``count``, and whether the output has ended."""
        return completion.token_ids[count:], completion.finish_reason is not None

    def _abort_dropped(self) -> None:
        for key, output in list(self._dropped.items()):
            if self._live.requests(output):
                self._change(self._abort, output)
            self._dropped.pop(key, None)

    @_one_thread
    def _step(self) -> None:
        self._check_leads("step")
        begin = time.perf_counter()
        try:
            self._change(self._launch_and_collect)
        finally:
            self._abort_dropped()
        self._seconds += time.perf_counter() - begin

    def _change(self, change: Callable[..., T], *arguments: Any) -> T:
        """Call a function that changes requests and their pages; if it raises, abort all requests.

        This leaves no partial change wherever an interrupt (KeyboardInterrupt, MemoryError) arrives. If the recovery
        itself is interrupted, the next call repeats it.
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
        self._live.abort_all()
        self._changing = self._interrupted = False

    def _queue(self, output: RequestOutput, requests: list[Request]) -> None:
        for request, completion in zip(requests, output.outputs, strict=True):
            self.scheduler.add(request)
            self._num_requested += 1
            self._live.add(request, completion, output)

    def _abort(self, output: RequestOutput) -> None:
        for request in self._live.requests(output):
            self.scheduler.abort(request.id)
            self._end(request, "abort")

    def _launch_and_collect(self) -> None:
        """Launch the next step, and collect the tokens of the last one. RuntimeError if there is neither."""
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
        result, self._in_flight = self._in_flight, None
        if result is None:
            return
        accepted, reasons = self._live.extend(result.wait(), self.tokenizer)
        failed = [name for name, reason in reasons.items() if reason == "error"]
        for request in self.scheduler.update(result.step, accepted, reasons.keys(), failed):
            self._end(request, reasons.get(request.id, "length"))
        if self.num_speculative_tokens:
            for request in [one.request for one in result.step.scheduled if one.samples]:
                request.draft_tokens = request.prompt_lookup.propose(request.tokens, self.num_speculative_tokens)

    def _end(self, request: Request, reason: str) -> None:
        self.runner.release(request)
        self._live.end(request, reason)
