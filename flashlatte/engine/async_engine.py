"""``AsyncEngine``: an engine in a separate thread, for any number of asyncio tasks.

Only that thread calls the engine. Tasks send it commands through a queue, which it runs between steps. After each step
it posts a snapshot of every output that changed to the event loop. A stream keeps only the latest snapshot of each of
its requests, so a slow reader neither blocks other readers nor accumulates results.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from typing import Any

import torch

from flashlatte.engine.engine import Engine
from flashlatte.engine.output_stream import OutputStream
from flashlatte.engine.outputs import RequestOutput
from flashlatte.engine.sampling_params import SamplingParams
from flashlatte.engine.validation import Prompt
from flashlatte.runtime import checks

_logger = logging.getLogger(__name__)


class QueueFull(RuntimeError):
    """The ``AsyncEngine`` has its maximum number of outputs that run, wait or are not read to their end."""


class EngineStopped(RuntimeError):
    """The engine was shut down before the request ended, or cannot be used after a failure."""


class StepFailed(RuntimeError):
    """The step that computed a request raised an error, which ended all requests."""


class AsyncEngine(contextlib.AbstractAsyncContextManager["AsyncEngine"]):
    """Runs an ``Engine`` in a thread, between ``async with`` and its end, for the tasks of one event loop. Names and
    results are those of vLLM.

    Args:
        engine: an engine of rank 0. Until it is closed, nothing else may call it, except ``Engine.statistics``.
        max_num_queued: outputs that are accepted beyond the ``max_num_seqs`` that run at a time.

    Attributes:
        max_num_outputs: maximum number of accepted outputs, including those that are not read to their end.
        step_error: the error of the last step; None if it succeeded.
        is_running: whether requests are accepted. A failed step of an engine on several ranks ends it.
    """

    def __init__(self, engine: Engine, *, max_num_queued: int = 256) -> None:
        checks.instance("engine", engine, Engine)
        checks.positive_int("max_num_queued", max_num_queued, or_zero=True)
        self.engine = engine
        self.max_num_outputs = engine.scheduler.max_num_seqs + max_num_queued
        self.step_error: BaseException | None = None
        self.is_running = False
        self._num_accepted = 0
        self._open: set[OutputStream] = set()
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="flashlatte-engine", daemon=True)
        # Owned by the engine's thread: the stream of each unfinished request, and the request's index in it.
        self._streams: dict[str, tuple[OutputStream, int]] = {}
        self._stopping = False

    async def __aenter__(self) -> AsyncEngine:
        if self._thread.ident is not None:
            raise RuntimeError("an AsyncEngine can be entered once: create another for the engine when it has ended")
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self.is_running = True
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the result of a request whenever it has new tokens. If the reader is slower than the engine, a result
        has several ``new_token_ids``. Leaving the iteration aborts the request.

        Raises:
            TypeError, ValueError, QueueFull, EngineStopped, StepFailed, RuntimeError: as ``add`` and ``OutputStream``.
        """
        request_ids = None if request_id is None else [request_id]
        stream = await self.add([prompt], sampling_params, request_ids=request_ids, cache_salt=cache_salt)
        async with contextlib.aclosing(stream):
            async for _, output in stream:
                yield output

    async def add(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        cache_salt: str = "",
    ) -> OutputStream:
        """Queue one request for each prompt, or none if one of them is invalid. The caller reads the returned stream to
        its end, or closes it.

        Raises:
            TypeError, ValueError: as ``Engine.add``; more outputs than ``max_num_outputs``.
            QueueFull: no room for the outputs now.
            EngineStopped: the engine is not running.
            RuntimeError: called in another event loop than that of ``async with``.
        """
        if not self.is_running:
            raise EngineStopped("the engine is not running" + _reason(self.step_error))
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                "an AsyncEngine must be called in the event loop of its `async with`: in another thread, use "
                "asyncio.run_coroutine_threadsafe"
            )
        if isinstance(prompts, str) or not isinstance(prompts, Collection):
            raise TypeError(f"prompts must be a sequence of prompts, got {prompts!r}")
        if request_ids is not None and len(request_ids) != len(prompts):
            raise ValueError(f"request_ids must be one for each of {len(prompts)} prompts, got {len(request_ids)}")
        params = SamplingParams() if sampling_params is None else sampling_params
        num_outputs = len(prompts) * getattr(params, "n", 1)
        if not 0 < num_outputs <= self.max_num_outputs:
            raise ValueError(f"prompts must have 1 to {self.max_num_outputs} outputs together, got {num_outputs}")
        if self._num_accepted + num_outputs > self.max_num_outputs:
            raise QueueFull(
                f"{self._num_accepted} of {self.max_num_outputs} outputs are running or waiting, and the request asks "
                f"for {num_outputs}"
            )
        names = [f"request-{uuid.uuid4().hex}" for _ in prompts] if request_ids is None else list(request_ids)
        stream = OutputStream(names, functools.partial(self._release, num_outputs))
        self._open.add(stream)
        self._num_accepted += num_outputs
        self._commands.put(functools.partial(self._add, stream, list(prompts), params, cache_salt))
        try:
            await stream.accepted
        except BaseException:
            await stream.aclose()
            raise
        return stream

    async def abort_all(self, reason: str) -> None:
        """End all requests; their streams raise ``EngineStopped``."""
        self._commands.put(functools.partial(self._end_all, EngineStopped(reason)))

    async def shutdown(self) -> None:
        """End all requests, and the thread after its current step. The engine can then be used again."""
        self.is_running = False
        self._commands.put(self._stop)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def statistics(self) -> dict[str, float]:
        """``Engine.statistics``, and the number of ``accepted`` outputs that are not read to their end."""
        return self.engine.statistics() | {"accepted": self._num_accepted}

    def _release(self, num_outputs: int, stream: OutputStream) -> None:
        """Called by a stream that is closed."""
        self._open.discard(stream)
        self._num_accepted -= num_outputs
        if not stream.ended:
            self._commands.put(functools.partial(self._abort, stream))

    def _thread_ended(self) -> None:
        """Fail the streams whose requests the thread has not processed. Runs in the event loop, so no request can be
        added meanwhile."""
        self.is_running = False
        for stream in list(self._open):
            stream.fail(EngineStopped("the engine was shut down" + _reason(self.step_error)))

    # The methods below run in the engine's thread.

    def _run(self) -> None:
        try:
            self._run_steps()
            self._end_all(EngineStopped("the engine was shut down"))
        finally:
            self._post(self._thread_ended)

    def _run_steps(self) -> None:
        while not self._stopping:
            try:
                self._run_commands()
                if not self._stopping and self.engine.unfinished:
                    self._step()
            except BaseException as error:
                _logger.exception("the engine failed, which ends all requests")
                self.step_error = error
                unusable = isinstance(error, torch.AcceleratorError) or not isinstance(error, Exception)
                self._stopping = self._stopping or unusable or self.engine.ranks.closed
                self._end_all(StepFailed("the engine failed" + _reason(error)))

    def _run_commands(self) -> None:
        """Run the commands that have arrived; wait for one if the engine has nothing to do."""
        with contextlib.suppress(queue.Empty):
            self._commands.get(block=not self.engine.unfinished)()
            while True:
                self._commands.get_nowait()()

    def _step(self) -> None:
        updates = []
        for output in self.engine.step():
            found = self._streams.get(output.request_id)
            if found is None:
                continue
            updates.append((*found, output.snapshot()))
            if output.finished:
                del self._streams[output.request_id]
        self.step_error = None
        self._post(OutputStream.update_all, updates)

    def _add(self, stream: OutputStream, prompts: list[Any], params: SamplingParams, cache_salt: str) -> None:
        added: list[str] = []
        try:
            for name, prompt in zip(stream.request_ids, prompts, strict=True):
                added.append(self.engine.add(prompt, params, request_id=name, cache_salt=cache_salt))
        except Exception as error:
            self._post(stream.refuse, error)
            if self.engine.unfinished < len(self._streams) + len(added):
                raise  # it was interrupted within a change, and the engine has aborted all requests
            for name in added:
                self.engine.abort(name)
            return
        self._streams.update((name, (stream, index)) for index, name in enumerate(added))
        self._post(stream.accept)

    def _abort(self, stream: OutputStream) -> None:
        for name in stream.request_ids:
            if self._streams.pop(name, None) is not None:
                self.engine.abort(name)

    def _stop(self) -> None:
        self._stopping = True

    def _end_all(self, error: Exception) -> None:
        """End all requests with an error."""
        names, streams = list(self._streams), {stream for stream, _ in self._streams.values()}
        self._streams = {}
        for stream in streams:
            self._post(stream.fail, error)
        for name in names:
            # After a failed step the engine has aborted them already.
            with contextlib.suppress(ValueError):
                self.engine.abort(name)

    def _post(self, call: Callable[..., object], *arguments: Any) -> None:
        # The loop may be closed if the program ends without ``shutdown``.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)


def _reason(error: BaseException | None) -> str:
    return "" if error is None else f": {type(error).__name__}: {error}"
