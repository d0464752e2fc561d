"""What a request has given, and where it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flashlatte.engine.detokenizer import Detokenizer
from flashlatte.engine.sampling import NO_TOKEN, SamplingParams


@dataclass
class Output:
    """What a request has given so far.

    Attributes:
        id: of the request.
        prompt: its tokens.
        tokens: generated, in order.
        logprobs: natural logarithms, of each of ``tokens``, if the request asked for them.
        finish_reason: "length", "stop", "abort", "error", or None while it runs.
        error: what went wrong, where ``finish_reason`` is "error".
        cached_tokens: that the prefix cache had, of the prompt, or of all its tokens where it gave way and began again.
        new: tokens that the last step added.
        told: how many of ``tokens`` ``Engine.step`` has told of; None where it is not to.
        sampling: how they are chosen; tokenizer: of the engine, or None.
    """

    id: str
    prompt: list[int]
    sampling: SamplingParams = field(repr=False)
    tokenizer: Any = field(default=None, repr=False)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    cached_tokens: int = 0
    new: list[int] = field(default_factory=list)
    told: int | None = field(default=0, repr=False)

    def __post_init__(self) -> None:
        self._watched = Detokenizer(self.tokenizer, self.sampling.stop) if self.sampling.stop else None

    @property
    def text(self) -> str:
        """Of ``tokens``, up to what stopped them. ValueError from an engine without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("text needs an engine with a tokenizer; tokens does not")
        ended = self.tokens[-1:] and self.tokens[-1] in self.sampling.stop_tokens
        text = self.tokenizer.decode(self.tokens[:-1] if ended else self.tokens)
        return text[: min((text.find(stop) for stop in self.sampling.stop if stop in text), default=len(text))]

    def extend(self, sampled: list[int], logprobs: list[float], drafts: list[int]) -> str | None:
        """Add what was sampled, up to the first token that its draft was not, that ends the request, or that is its
        last.

        Returns:
            "stop" or "error" where a token, or the lack of one, ends the request; else None.
        """
        self.new, reason = [], None
        for offset, token in enumerate(sampled[: self.sampling.max_new_tokens - len(self.tokens)]):
            if token == NO_TOKEN:
                position = len(self.prompt) + len(self.tokens) + offset
                self.error = f"no token at position {position} can be chosen: the logits are NaN, or all are -inf"
                reason = "error"
                break
            self.new.append(token)
            if token in self.sampling.stop_tokens or (self._watched is not None and self._watched.add(token)[1]):
                reason = "stop"
            if reason is not None or (offset < len(drafts) and token != drafts[offset]):
                break
        self.tokens = self.tokens + self.new
        if self.sampling.logprobs:
            self.logprobs = self.logprobs + logprobs[: len(self.new)]
        return reason


@contextlib.contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar of finished requests, if ``shown``; yields what is told how many they are."""
    if not shown:
        yield lambda done: None
        return
    try:
        from rich.progress import Progress
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("progress needs rich: pip install 'flashlatte[transformers]'") from error
    with Progress() as bar:
        task = bar.add_task("requests", total=total)
        yield lambda done: bar.update(task, completed=done)
