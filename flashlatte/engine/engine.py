"""``Engine``: requests in, tokens out."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from flashlatte.engine import memory
from flashlatte.engine.drafts import look_up
from flashlatte.engine.model import Model
from flashlatte.engine.outputs import Output, accepted_tokens, progress_bar, until_stop
from flashlatte.engine.pages import PagePool
from flashlatte.engine.request import Request
from flashlatte.engine.runner import Runner, Sampled
from flashlatte.engine.sampling import SamplingParams, token_ids
from flashlatte.engine.scheduler import Scheduler
from flashlatte.engine.step import Step
from flashlatte.runtime import checks

# A text, for an engine with a tokenizer, or its tokens: ints, or a tensor [n] of them.
Prompt = str | Sequence[int] | torch.Tensor


class Engine:
    """Continuous batching over a paged cache with prefix sharing, for one model on one device.

    Args:
        model: a ``Model``, a transformers model, or a checkpoint's directory.
        cache_format: of the pages; by default plain rows in the model's dtype.
        num_pages: of the cache; by default what fits 0.8 of a GPU's free memory, or 16,384 tokens on a CPU.
        page_size: tokens in a page.
        host_pages: pages of a copy on the host, to which requests that give way are swapped; 0: they are computed
            again.
        max_tokens: of a step. max_requests: that run at a time. patience: see ``Scheduler``.
        prefix_cache: whether requests that begin alike share pages.
        drafts: tokens to guess from the request's own text and verify in one step (prompt lookup); 0: none.
        graphs: whether decode steps run as CUDA graphs (on a GPU).
        tokenizer: with ``encode`` and ``decode``, for prompts and stops that are texts.

    Raises:
        TypeError, ValueError: a limit below 1, an unknown or unfit cache format, a cache that does not fit the memory.
    """

    def __init__(
        self,
        model: Any,
        *,
        cache_format: str | None = None,
        num_pages: int | None = None,
        page_size: int = 64,
        host_pages: int = 0,
        max_tokens: int = 2048,
        max_requests: int = 64,
        patience: int = 64,
        prefix_cache: bool = True,
        drafts: int = 0,
        graphs: bool = True,
        tokenizer: Any = None,
    ) -> None:
        for name, value in (
            ("page_size", page_size),
            ("max_tokens", max_tokens),
            ("max_requests", max_requests),
            ("patience", patience),
        ):
            checks.positive_int(name, value)
        for name, value in (("prefix_cache", prefix_cache), ("graphs", graphs)):
            checks.flag(name, value)
        for name, value in (("host_pages", host_pages), ("drafts", drafts)):
            checks.positive_int(name, value, or_zero=True)
        self.model = model if isinstance(model, Model) else Model(model)
        self.cache_format = memory.plain_format(self.model.dtype) if cache_format is None else cache_format
        if num_pages is None:
            num_pages = memory.default_pages(self.model, self.cache_format, page_size)
        checks.positive_int("num_pages", num_pages)
        caches = memory.allocate(self.model, self.cache_format, num_pages, page_size)
        host_caches = None
        if host_pages:
            host_caches = memory.allocate(self.model, self.cache_format, host_pages, page_size, on_host=True)
        identity = f"{self.model.name}:{self.cache_format}"
        self.pool = PagePool(num_pages, page_size, identity=identity)
        self.scheduler = Scheduler(
            self.pool,
            host_pool=PagePool(host_pages, page_size, identity=identity) if host_pages else None,
            max_tokens=max_tokens,
            max_requests=max_requests,
            patience=patience,
            prefix_cache=prefix_cache,
        )
        self.max_seq_len = min(self.model.max_position, num_pages * page_size)
        self.runner = Runner(
            self.model,
            self.cache_format,
            caches,
            host_caches,
            max_requests=max_requests,
            max_tokens=max_tokens,
            max_seq_len=self.max_seq_len,
            graphs=graphs,
        )
        self.drafts, self.tokenizer = drafts, tokenizer
        self._params: dict[str, SamplingParams] = {}
        self._requests: dict[str, Request] = {}
        self._outputs: dict[str, Output] = {}
        self._under_way: tuple[Step, Sampled] | None = None
        # What steps of ``stream`` and ``generate`` changed of requests that are not theirs, and tokens told before.
        self._untold: dict[int, tuple[Output, int]] = {}
        self._names = itertools.count()
        self._seconds = 0.0

    def add(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        id: str | None = None,
        priority: int = 0,
        salt: str = "",
    ) -> str:
        """Queue a request; returns its id. ``priority`` and ``salt`` as in ``Request``.

        Raises:
            TypeError, ValueError: a prompt that is empty, or with tokens that the model does not have; more tokens
                than the model or the cache has room for; an id that is in use.
        """
        sampling = SamplingParams() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling must be SamplingParams or None, got {type(sampling).__name__}")
        for what, value in (("id", "" if id is None else id), ("salt", salt)):
            if not isinstance(value, str):
                raise TypeError(f"{what} must be a text, got {value!r}")
        checks.integer("priority", priority)
        tokens = self._encode(prompt)
        if sampling.stop and self.tokenizer is None:
            raise ValueError("stop needs an engine with a tokenizer; stop_tokens does not")
        suppressed = self._checked_tokens("suppress_tokens", sampling.suppress_tokens)
        if len(set(suppressed)) == self.model.vocabulary:
            raise ValueError("suppress_tokens must leave a token to choose, got all of them")
        name = f"request-{next(self._names)}" if id is None else id
        request = Request(name, tokens, sampling.max_new_tokens, priority=priority, salt=salt)
        if request.most_cached + 1 > self.model.max_position:
            raise ValueError(
                f"prompt of {len(tokens)} tokens and max_new_tokens {sampling.max_new_tokens} of request {name!r} "
                f"must not pass the model's {self.model.max_position} positions"
            )
        self.scheduler.add(request)
        self._requests[name], self._params[name] = request, sampling
        self._outputs[name] = Output(name, tokens)
        return name

    def step(self) -> list[Output]:
        """Run a step; returns the requests that it gave tokens to, or that ended.

        So it does of steps that ``stream`` and ``generate`` ran meanwhile for others. Without drafts the next step is
        planned and launched before the tokens of the last are waited for.
        """
        untold, self._untold = self._untold, {}
        for output in self._step():
            untold.setdefault(id(output), (output, len(output.tokens) - len(output.new)))
        for output, told in untold.values():
            output.new = output.tokens[told:]
        return [output for output, _ in untold.values()]

    def _step(self) -> list[Output]:
        begin = time.perf_counter()
        changed: list[Output] = []
        if self.drafts:
            changed += self._collect()
            for request in self._requests.values():
                request.drafts = look_up(request.tokens, self.drafts)
        step = self.scheduler.schedule()
        launched = None if step is None else (step, self.runner.run(step, self._params))
        changed += self._collect()
        self._under_way = launched
        self._seconds += time.perf_counter() - begin
        return changed

    def abort(self, request_id: str) -> Output:
        """End a request now; one that has ended, of which ``step`` is still to tell, stays as it is.

        Raises:
            ValueError: there is no unfinished request of this id.
        """
        request = self.scheduler.abort(request_id)
        if request is not None:
            output = self._end(request, "abort")
        else:
            output = next((one for one, _ in self._untold.values() if one.id == request_id), None)
        if output is None:
            raise ValueError(f"request_id must be of an unfinished request, got {request_id!r}")
        self._untold.pop(id(output), None)
        return output

    @property
    def unfinished(self) -> int:
        """Requests that have not ended, or of whose end ``step`` is still to tell."""
        return len(self.scheduler) + sum(output.finish_reason is not None for output, _ in self._untold.values())

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Output]:
        """Generate for all prompts; outputs in their order. ``progress`` shows a bar (needs rich)."""
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"sampling must be one for all or one for each of {len(prompts)} prompts, got {len(each)}")
        names: list[str] = []
        try:
            for prompt, one in zip(prompts, each, strict=True):
                names.append(self.add(prompt, one))
        except (TypeError, ValueError):
            # Who gets an error here asks for none of them any more.
            for name in names:
                self.abort(name)
            raise
        outputs = [self._outputs[name] for name in names]
        with progress_bar(len(names), progress) as advance, self._stepping_for(outputs) as step:
            running = len(outputs)
            while running:
                step()
                left = sum(output.finish_reason is None for output in outputs)
                for _ in range(running - left):
                    advance()
                running = left
        return outputs

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[int]:
        """The tokens of one request as they come; other requests go on beside it."""
        name = self.add(prompt, sampling)
        output, given = self._outputs[name], 0
        with self._stepping_for([output]) as step:
            # Steps that others run in between give tokens to this request too.
            while given < len(output.tokens) or output.finish_reason is None:
                if given == len(output.tokens):
                    step()
                new = output.tokens[given:]
                given += len(new)
                yield from new

    def statistics(self) -> dict[str, float]:
        """Counts since the start.

        ``computed_tokens`` and ``cached_tokens`` (which the prefix cache had), requests ``swapped`` and
        ``recomputed`` when pages ran out, ``pages_in_use`` of ``pages``, ``seconds`` spent in steps, and
        ``tokens_per_second`` computed in them.
        """
        counts = self.scheduler.statistics
        return {
            "computed_tokens": counts.computed_tokens,
            "cached_tokens": counts.cached_tokens,
            "swapped": counts.swapped,
            "recomputed": counts.recomputed,
            "pages": self.pool.num_pages,
            "pages_in_use": self.pool.in_use,
            "seconds": self._seconds,
            "tokens_per_second": counts.computed_tokens / self._seconds if self._seconds else 0.0,
        }

    @contextlib.contextmanager
    def _stepping_for(self, outputs: Sequence[Output]) -> Iterator[Callable[[], None]]:
        """Yields what runs a step on behalf of these requests; those that are left at the end, by an error too, are
        aborted.
        """
        own = {id(output) for output in outputs}

        def step() -> None:
            for output in self._step():
                if id(output) not in own:
                    self._untold.setdefault(id(output), (output, len(output.tokens) - len(output.new)))

        try:
            yield step
        finally:
            for output in outputs:
                self._untold.pop(id(output), None)
                if output.finish_reason is None:
                    self.abort(output.id)

    def _collect(self) -> list[Output]:
        """Wait for the tokens of the step under way and hand them out."""
        if self._under_way is None:
            return []
        (step, sampled), self._under_way = self._under_way, None
        sampled.wait()
        values = sampled.tokens.tolist()
        logprobs = None if sampled.logprobs is None else sampled.logprobs.tolist()
        accepted: dict[str, list[int]] = {}
        changed, stopped = [], []
        for work in step.work:
            request = work.request
            if not work.samples or request.finished:
                continue
            first, count = sampled.rows[request.id]
            new = accepted_tokens(values[first : first + count], request.drafts[: work.drafts])
            output, params = self._outputs[request.id], self._params[request.id]
            new, stops = until_stop(output.tokens, new, params, self.tokenizer)
            accepted[request.id] = output.new = new
            output.tokens = output.tokens + new
            if params.logprobs and logprobs is not None:
                output.logprobs = output.logprobs + logprobs[first : first + len(new)]
            if stops:
                stopped.append(request.id)
            changed.append(output)
        for request in self.scheduler.update(step, accepted, stopped):
            self._end(request, "stop" if request.id in stopped else "length")
        return changed

    def _end(self, request: Request, reason: str) -> Output:
        self.runner.forget(request)
        del self._requests[request.id], self._params[request.id]
        output = self._outputs.pop(request.id)
        output.finish_reason, output.cached_tokens = reason, request.cached
        return output

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TypeError("prompt must be tokens, as the engine has no tokenizer, got a text")
            prompt = self.tokenizer.encode(prompt)
        return self._checked_tokens("prompt", prompt)

    def _checked_tokens(self, name: str, values: Iterable[Any]) -> list[int]:
        tokens = token_ids(name, values)
        wrong = next((token for token in tokens if not 0 <= token < self.model.vocabulary), None)
        if wrong is not None:
            raise ValueError(f"{name} must hold tokens from 0 to {self.model.vocabulary - 1}, got {wrong}")
        return tokens
