"""The unfinished requests of an engine with their outputs, and the outputs that ``Engine.step`` has yet to return."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from flashlatte.engine.outputs import CompletionOutput, RequestOutput
from flashlatte.engine.request import Request
from flashlatte.engine.runner import RequestResult


class LiveRequests:
    """Requests of the scheduler, one for each output that has not ended, by their ids."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Request, CompletionOutput, RequestOutput]] = {}
        self._undelivered: dict[int, RequestOutput] = {}  # by id()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        """Number of ``RequestOutput`` that are unfinished, or that are finished and undelivered."""
        live = {id(output) for *_, output in self._entries.values()}
        return len(live) + sum(output.finished for output in self._undelivered.values())

    def unused_id(self, number: int) -> str:
        """The first id of the form request-N, from ``number`` on, that no unfinished request has."""
        used = {output.request_id for output in self.outputs()}
        return next(name for one in itertools.count(number) if (name := f"request-{one}") not in used)

    def check_unused(self, request_id: str) -> None:
        """Raise ValueError if an unfinished request has the id."""
        if any(output.request_id == request_id for output in self.outputs()):
            raise ValueError(f"request_id must be unique among unfinished requests, got {request_id!r} again")

    def outputs(self) -> list[RequestOutput]:
        """The unfinished outputs, in the order in which they were added."""
        return list({id(output): output for *_, output in self._entries.values()}.values())

    def requests(self, output: RequestOutput) -> list[Request]:
        """The scheduler's unfinished requests of an output."""
        return [request for request, _, other in self._entries.values() if other is output]

    def add(self, request: Request, completion: CompletionOutput, output: RequestOutput) -> None:
        self._entries[request.id] = request, completion, output

    def end(self, request: Request, reason: str) -> None:
        """Set the reason for which a request ended, and remove it."""
        _, completion, output = self._entries[request.id]
        _set_finished(request, completion, output, reason)
        del self._entries[request.id]

    def abort_all(self) -> None:
        """End all requests. ``Engine.step`` does not return them."""
        for request, completion, output in self._entries.values():
            self._undelivered.pop(id(output), None)
            if completion.finish_reason is None:
                _set_finished(request, completion, output, "abort")
        self._entries = {}

    def extend(self, results: Sequence[RequestResult], tokenizer: Any) -> tuple[dict[str, list[int]], dict[str, str]]:
        """Add the results of a step to the outputs.

        Returns:
            Two mappings by request id: the tokens that were added, and "stop" or "error" for requests that ended so.
        """
        accepted, reasons = dict[str, list[int]](), dict[str, str]()
        for result in results:
            if (request := result.scheduled.request).finished:
                continue
            _, completion, output = self._entries[request.id]
            if result.prompt_logprobs:
                output.add_prompt_logprobs(result.prompt_logprobs, tokenizer)
            if not result.scheduled.samples:
                continue
            before, drafts = len(completion.token_ids), request.draft_tokens[: result.scheduled.num_drafts]
            if (reason := completion.extend(result.tokens, result.logprobs, drafts)) is not None:
                reasons[request.id] = reason
            accepted[request.id] = completion.token_ids[before:]
            if output.returned_by_step:
                self._undelivered[id(output)] = output
        return accepted, reasons

    def deliver(self) -> list[RequestOutput]:
        """The outputs that changed since the last call, with their new tokens."""
        changed = list(self._undelivered.values())
        for output in changed:
            output.mark_delivered()
        self._undelivered = {}
        return changed

    def take_undelivered(self, request_id: str) -> RequestOutput | None:
        """Remove and return an undelivered output."""
        output = next((one for one in self._undelivered.values() if one.request_id == request_id), None)
        if output is not None:
            del self._undelivered[id(output)]
        return output


def _set_finished(request: Request, completion: CompletionOutput, output: RequestOutput, reason: str) -> None:
    completion.finish_reason = reason
    if completion.index == 0:
        output.num_cached_tokens = request.num_cached_tokens or 0
