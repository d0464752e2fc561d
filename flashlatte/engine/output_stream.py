"""``OutputStream``: the results of some requests of an ``AsyncEngine``, each time that they grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from flashlatte.engine.outputs import RequestOutput


class OutputStream(AsyncIterator[tuple[int, RequestOutput]]):
    """Iterates over (index of the request, its result so far), for requests that were added together.

    An update of a request replaces the one before it that was not read. ``new_token_ids`` are the tokens since the last
    result of this request that was read. The iteration ends, and closes the stream, when all requests have ended.

    All methods run in the event loop's thread.

    Args:
        request_ids: ids of the requests.
        on_close: called once, with the stream, when it is closed.

    Attributes:
        ended: whether all requests have ended.
        accepted: a future that is done when the engine has queued the requests, or refused them.

    Raises:
        EngineStopped, StepFailed: in the iteration, if the engine ended the requests.
    """

    def __init__(self, request_ids: Sequence[str], on_close: Callable[[OutputStream], object]) -> None:
        self.request_ids = list(request_ids)
        self.ended, self._closed, self._on_close = False, False, on_close
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()
        self._latest: dict[int, RequestOutput] = {}
        self._num_read: dict[tuple[int, int], int] = {}
        self._num_unfinished = len(self.request_ids)
        self._error: Exception | None = None

    async def __anext__(self) -> tuple[int, RequestOutput]:
        while not self._latest:
            if self._error is not None or self.ended or self._closed:
                await self.aclose()
                raise self._error or StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        index = next(iter(self._latest))
        output = self._latest.pop(index)
        for completion in output.outputs:
            key = index, completion.index
            completion.new_token_ids = completion.token_ids[self._num_read.get(key, 0) :]
            self._num_read[key] = len(completion.token_ids)
        return index, output

    async def aclose(self) -> None:
        """Abort the requests that have not ended, and free their slots. Repeated calls have no effect."""
        if not self._closed:
            self._closed = True
            self._latest = {}
            self._changed.set()
            self._on_close(self)

    def accept(self) -> None:
        if not self.accepted.done():
            self.accepted.set_result(None)

    def refuse(self, error: Exception) -> None:
        self.ended = True
        if not self.accepted.done():
            self.accepted.set_exception(error)

    def fail(self, error: Exception) -> None:
        """End the iteration with an error, after the results that were not read, unless all requests have ended."""
        if not self.ended:
            self._error, self.ended = error, True
        self.accept()
        self._changed.set()

    @staticmethod
    def update_all(updates: Iterable[tuple[OutputStream, int, RequestOutput]]) -> None:
        """Give each stream the latest result of one of its requests."""
        for stream, index, output in updates:
            if stream._closed:
                continue
            stream._latest[index] = output
            stream._num_unfinished -= output.finished
            stream.ended = stream.ended or stream._num_unfinished == 0
            stream._changed.set()
