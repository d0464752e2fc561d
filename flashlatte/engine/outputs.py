"""What a request has given, and where it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashlatte.engine.sampling import SamplingParams


@dataclass
class Output:
    """What a request has given so far.

    Attributes:
        id: of the request.
        prompt: its tokens.
        tokens: generated, in order.
        logprobs: natural logarithms, of each of ``tokens``, if the request asked for them.
        finish_reason: "length", "stop", "abort", or None while it runs.
        cached_tokens: tokens of the prompt that the prefix cache had.
        new: tokens that the last step added.
    """

    id: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: int = 0
    new: list[int] = field(default_factory=list)

    def extend(
        self, tokens: list[int], logprobs: list[float] | None, drafts: list[int], params: SamplingParams, tokenizer: Any
    ) -> bool:
        """Add what was sampled, up to the first token that its draft was not; whether the request stops with it."""
        self.new, stops = until_stop(self.tokens, accepted_tokens(tokens, drafts), params, tokenizer)
        self.tokens = self.tokens + self.new
        if params.logprobs and logprobs is not None:
            self.logprobs = self.logprobs + logprobs[: len(self.new)]
        return stops


def accepted_tokens(sampled: list[int], drafts: list[int]) -> list[int]:
    """What was sampled up to and including the first token that its draft was not."""
    for count, draft in enumerate(drafts):
        if sampled[count] != draft:
            return sampled[: count + 1]
    return sampled


def until_stop(before: Sequence[int], new: list[int], params: SamplingParams, tokenizer: Any) -> tuple[list[int], bool]:
    """The new tokens up to one that ends the request, or to its limit; and whether one ends it."""
    new = new[: params.max_new_tokens - len(before)]
    for count, token in enumerate(new, 1):
        if token in params.stop_tokens:
            return new[:count], True
        if params.stop:
            text = tokenizer.decode([*before, *new[:count]])
            if any(stop in text for stop in params.stop):
                return new[:count], True
    return new, False


class Untold:
    """Outputs that were changed in steps run for others, of which ``Engine.step`` is still to tell."""

    def __init__(self) -> None:
        # Each with the number of its tokens that were told before.
        self._outputs: dict[int, tuple[Output, int]] = {}

    @property
    def ended(self) -> int:
        return sum(output.finish_reason is not None for output, _ in self._outputs.values())

    def add(self, output: Output) -> None:
        """A step has changed it; its first change counts."""
        self._outputs.setdefault(id(output), (output, len(output.tokens) - len(output.new)))

    def drop(self, output: Output) -> None:
        self._outputs.pop(id(output), None)

    def find(self, request_id: str) -> Output | None:
        return next((output for output, _ in self._outputs.values() if output.id == request_id), None)

    def tell(self) -> list[Output]:
        """All of them, with the tokens of every change as new ones, and forget them."""
        outputs, self._outputs = self._outputs, {}
        for output, told in outputs.values():
            output.new = output.tokens[told:]
        return [output for output, _ in outputs.values()]


@contextlib.contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar of finished requests, if ``shown``; yields what advances it."""
    if not shown:
        yield lambda: None
        return
    try:
        from rich.progress import Progress
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("progress needs rich: pip install 'flashlatte[transformers]'") from error
    with Progress() as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)
