"""The results of requests, with vLLM's names."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashlatte.engine.detokenizer import Detokenizer, StopMatch
from flashlatte.engine.logprobs import Logprob, RankedToken
from flashlatte.engine.request import Request
from flashlatte.engine.sampling import NO_TOKEN
from flashlatte.engine.sampling_params import SamplingParams


class RequestFailed(RuntimeError):
    """A streamed request ended with "error"."""


@dataclass
class CompletionOutput:
    """One output of a request.

    Attributes:
        index: index of the output in its request.
        token_ids: generated tokens, including the one that stopped the output.
        logprobs: for each generated token, the log-probabilities of that token and of the most likely ones by token
            id; None unless ``SamplingParams.logprobs`` is given.
        cumulative_logprob: sum over the generated tokens; None without ``logprobs``.
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        stop_reason: the stop string, or the token of ``stop_token_ids``, that ended the output; else None.
        error: the cause if ``finish_reason`` is "error", else None.
        new_token_ids: tokens added since ``Engine.step`` last returned the output.
    """

    index: int
    sampling: SamplingParams = field(repr=False)
    num_prompt_tokens: int = field(repr=False)
    tokenizer: Any = field(default=None, repr=False)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    new_token_ids: list[int] = field(default_factory=list)
    num_delivered: int = field(default=0, repr=False)
    stop_match: StopMatch | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.sampling.logprobs is not None:
            self.logprobs, self.cumulative_logprob = [], 0.0
        self._detokenizer: Detokenizer | None = None
        if self.sampling.stop:
            stop: Any = self.sampling.stop
            self._detokenizer = Detokenizer(self.tokenizer, stop, self.sampling.skip_special_tokens)

    @property
    def text(self) -> str:
        """The generated text, without the stop string or token unless ``include_stop_str_in_output`` is set.

        Raises:
            ValueError: the engine has no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("text needs an engine with a tokenizer; token_ids does not")
        keeps_stop, tokens = self.sampling.include_stop_str_in_output, self.token_ids
        if tokens and not keeps_stop and tokens[-1] in self.sampling.all_stop_token_ids:
            tokens = tokens[:-1]
        skip_special_tokens = self.sampling.skip_special_tokens
        text = self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        if "\N{REPLACEMENT CHARACTER}" in text:
            # Some tokenizers replace all bytes of a run that has an invalid one, also those of characters that were
            # complete before it. The text is the one that was streamed.
            stream = Detokenizer(self.tokenizer, skip_special_tokens=skip_special_tokens)
            text = "".join([*(stream.add(token)[0] for token in tokens), stream.rest()])
        if self.stop_match is None:
            return text
        return text[: self.stop_match.begin + (len(self.stop_match.stop) if keeps_stop else 0)]

    def extend(self, sampled: list[int], ranked: Sequence[list[RankedToken]], drafts: list[int]) -> str | None:
        """Add sampled tokens, up to the first one that differs from its draft token, that ends the output, or that is
        the last one.

        Args:
            ranked: log-probabilities of each sampled token; empty if they were not requested.

        Returns:
            "stop" or "error" if the output ends for this reason; else None.
        """
        new: list[int] = []
        reason = None
        for offset, token in enumerate(sampled[: self.sampling.max_tokens - len(self.token_ids)]):
            count = len(self.token_ids) + offset + 1
            if token == NO_TOKEN:
                position = self.num_prompt_tokens + count - 1
                self.error = f"no token at position {position} can be chosen: the logits are NaN, or all are -inf"
                reason = "error"
                break
            new.append(token)
            match = None if self._detokenizer is None else self._detokenizer.add(token)[1]
            if token in self.sampling.all_stop_token_ids:
                reason = "stop"
                self.stop_reason = token if token in (self.sampling.stop_token_ids or ()) else None
            elif match is not None and count > self.sampling.min_tokens:
                reason, self.stop_match, self.stop_reason = "stop", match, match.stop
            if reason is not None or (offset < len(drafts) and token != drafts[offset]):
                break
        if self.logprobs is not None:
            added = [decoded(one, self.tokenizer) for one in ranked[: len(new)]]
            gain = sum(one[token].logprob for one, token in zip(added, new, strict=True))
            self.logprobs, self.cumulative_logprob = self.logprobs + added, (self.cumulative_logprob or 0.0) + gain
        self.token_ids = self.token_ids + new
        return reason


@dataclass
class RequestOutput:
    """The result of a request so far.

    Attributes:
        request_id: id of the request.
        prompt: its text; None if it was passed as tokens.
        prompt_token_ids: its tokens.
        outputs: ``SamplingParams.n`` outputs.
        prompt_logprobs: for each prompt token, log-probabilities by token id, None for the first token; None unless
            ``SamplingParams.prompt_logprobs`` is given.
        num_cached_tokens: prompt tokens of the first output that the prefix cache provided at its start; without
            those of restarts after preemption. 0 until it ends.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    # Whether ``Engine.step`` returns it, rather than ``generate`` or ``stream``.
    returned_by_step: bool = field(default=True, repr=False)

    @classmethod
    def of(cls, request_id: str, prompt: object, requests: Sequence[Request], tokenizer: Any) -> RequestOutput:
        """The empty result of a request, with an output for each of the scheduler's requests."""
        outputs = [
            CompletionOutput(index, request.sampling, len(request.prompt), tokenizer)
            for index, request in enumerate(requests)
        ]
        text = prompt if isinstance(prompt, str) else None
        # The first token has no log-probability.
        scored: list[dict[int, Logprob] | None] | None = [None] if requests[0].scores_prompt else None
        return cls(request_id, text, requests[0].prompt, outputs, scored)

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    def snapshot(self) -> RequestOutput:
        """A copy that later steps do not change. It shares the lists: steps replace them and never change them."""
        copied = copy.copy(self)
        copied.outputs = [copy.copy(output) for output in self.outputs]
        return copied

    def add_prompt_logprobs(self, ranked: Sequence[list[RankedToken]], tokenizer: Any) -> None:
        """Add the log-probabilities of the next prompt tokens."""
        self.prompt_logprobs = [*(self.prompt_logprobs or ()), *(decoded(one, tokenizer) for one in ranked)]

    def mark_delivered(self) -> None:
        """Set ``new_token_ids`` to the tokens added since the last call."""
        for output in self.outputs:
            output.new_token_ids = output.token_ids[output.num_delivered :]
            output.num_delivered = len(output.token_ids)


def decoded(ranked: list[RankedToken], tokenizer: Any) -> dict[int, Logprob]:
    """Log-probabilities by token id."""
    return {
        token: Logprob(logprob, rank, None if tokenizer is None else tokenizer.decode([token]))
        for token, logprob, rank in ranked
    }


@contextlib.contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar of finished requests, if ``shown``; yields a function that sets their number."""
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
