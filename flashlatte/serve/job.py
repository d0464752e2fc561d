"""A parsed request, and the parts of its response, which completions and chat format differently."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol

from flashlatte.engine.logprobs import Logprob
from flashlatte.engine.outputs import CompletionOutput, RequestOutput
from flashlatte.engine.sampling_params import SamplingParams
from flashlatte.engine.text_stream import TextStream
from flashlatte.serve.logprobs import ScoredToken


@dataclass(frozen=True)
class ChoicePart:
    """A new part of a choice.

    Attributes:
        index: index of the choice.
        text: new text.
        scored: the new tokens with their log-probabilities; None if these were not requested.
        offset: number of characters of the tokens before them.
        is_first: whether it begins the choice.
    """

    index: int
    text: str
    scored: list[ScoredToken] | None
    offset: int
    is_first: bool
    finish_reason: str | None
    stop_reason: int | str | None


class AnswerForm(Protocol):
    """The JSON of one endpoint."""

    id_prefix: str
    object: str
    chunk_object: str

    def choice(self, part: ChoicePart) -> dict[str, Any]:
        """A whole choice."""
        ...

    def chunk(self, part: ChoicePart) -> dict[str, Any]:
        """A part of a choice in a stream."""
        ...


@dataclass(frozen=True)
class GenerationJob:
    """A request that is valid by itself.

    Attributes:
        prompts: tokens of each prompt.
        sampling: sampling parameters of all prompts.
        prompt_field: the field of the prompt, for errors.
        echo: text of each prompt, with which its choices begin; None: they do not.
        created, parsed_at: Unix time in seconds, and ``time.perf_counter``, of this object.
    """

    prompts: list[list[int]]
    sampling: SamplingParams
    form: AnswerForm
    prompt_field: str
    stream: bool
    include_usage: bool
    cache_salt: str = ""
    echo: list[str] | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    parsed_at: float = field(default_factory=time.perf_counter)

    @property
    def num_outputs(self) -> int:
        return len(self.prompts) * self.sampling.n

    def choice_index(self, prompt: int, output: int) -> int:
        return prompt * self.sampling.n + output


class ChoiceReader:
    """Divides one output into parts as it grows.

    Args:
        job: the request.
        prompt: index of the output's prompt.
        output: the output.
    """

    def __init__(self, job: GenerationJob, prompt: int, output: CompletionOutput) -> None:
        self._job, self._prompt, self._index = job, prompt, job.choice_index(prompt, output.index)
        self._text = TextStream(output)
        self._num_tokens = self._offset = 0
        self._is_first, self._finished = True, False

    def whole(self, request: RequestOutput, output: CompletionOutput) -> ChoicePart:
        """All of an output that has ended."""
        return self._part(request, output, output.text)

    def next(self, request: RequestOutput, output: CompletionOutput) -> ChoicePart | None:
        """The part since the last call; None if there is nothing to send."""
        if self._finished:
            return None
        num_scored = len(request.prompt_logprobs or ())
        if self._job.sampling.prompt_logprobs is not None and num_scored < len(request.prompt_token_ids):
            return None  # another output of the prompt scores it
        part = self._part(request, output, self._text.update(output))
        self._finished = part.finish_reason is not None
        if part.text or part.scored or self._finished:
            return part
        self._is_first = part.is_first  # a character is not complete, or may belong to a stop string
        return None

    def _part(self, request: RequestOutput, output: CompletionOutput, text: str) -> ChoicePart:
        echo = self._job.echo if self._is_first else None
        if echo is not None:
            text = echo[self._prompt] + text
        scored = None
        if output.logprobs is not None:
            tokens, logprobs = output.token_ids[self._num_tokens :], output.logprobs[self._num_tokens :]
            pairs: list[tuple[int, dict[int, Logprob] | None]] = [*zip(tokens, logprobs, strict=True)]
            if echo is not None:
                pairs[:0] = zip(request.prompt_token_ids, request.prompt_logprobs or (), strict=True)
            scored = [self._scored(output, *pair) for pair in pairs]
        part = ChoicePart(
            self._index, text, scored, self._offset, self._is_first, output.finish_reason, output.stop_reason
        )
        self._num_tokens, self._is_first = len(output.token_ids), False
        self._offset += sum(len(one.text) for one in scored or ())
        return part

    def _scored(self, output: CompletionOutput, token: int, logprobs: dict[int, Logprob] | None) -> ScoredToken:
        text = output.tokenizer.decode([token]) if logprobs is None else logprobs[token].decoded_token or ""
        return ScoredToken(token, text, logprobs)
