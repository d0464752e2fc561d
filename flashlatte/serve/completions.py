"""``/v1/completions``: continues text or tokens."""

from __future__ import annotations

from typing import Any

from flashlatte.serve.context import ServerContext
from flashlatte.serve.errors import ApiError
from flashlatte.serve.fields import Fields, parse_json
from flashlatte.serve.job import ChoicePart, GenerationJob
from flashlatte.serve.logprobs import completion_logprobs
from flashlatte.serve.sampling import MAX_LOGPROBS, read_rest, read_sampling, read_stream, sampling_params

# OpenAI's default.
_MAX_TOKENS = 16


class CompletionForm:
    """The JSON of completions."""

    id_prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def choice(self, part: ChoicePart) -> dict[str, Any]:
        return {
            "index": part.index,
            "text": part.text,
            "logprobs": None if part.scored is None else completion_logprobs(part.scored, part.offset),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }

    chunk = choice


def parse_completion(body: bytes, context: ServerContext) -> GenerationJob:
    """Parse the body of a request.

    Raises:
        ApiError: a field is wrong, or not supported.
    """
    fields = parse_json(body)
    context.check_model(fields)
    values = read_sampling(fields)
    stream, include_usage = read_stream(fields)
    max_tokens = fields.integer("max_tokens", 1)
    values["logprobs"] = fields.integer("logprobs", 0, MAX_LOGPROBS)
    echo = bool(fields.flag("echo"))
    if echo:
        values["prompt_logprobs"] = values["logprobs"]
    add_special_tokens = fields.flag("add_special_tokens")
    fields.unsupported("best_of", values.get("n", 1))
    fields.unsupported("suffix", "")
    prompts = _prompts(fields)
    # Before they are encoded, which takes long for many.
    context.check_num_outputs(len(prompts), values.get("n", 1), "prompt")
    salt = read_rest(fields)

    texts: list[str] = []
    tokens: list[list[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            tokens.append(context.tokenizer.encode(prompt, add_special_tokens=add_special_tokens is not False))
        else:
            tokens.append(prompt)
        if not tokens[-1]:
            raise ApiError(400, "prompt must have at least one token, got none", param="prompt")
        if echo:
            texts.append(prompt if isinstance(prompt, str) else context.decode(prompt, "prompt"))
    sampling = sampling_params(values, context.room_after(tokens, "prompt"), max_tokens, _MAX_TOKENS, "max_tokens")
    return GenerationJob(
        tokens, sampling, CompletionForm(), "prompt", stream, include_usage, salt, texts if echo else None
    )


def _prompts(fields: Fields) -> list[str | list[int]]:
    """A string, tokens, or a list of strings or of tokens."""
    value = fields.required("prompt")
    is_tokens = isinstance(value, list) and value and all(type(one) is int for one in value)
    if is_tokens or isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise fields.error("prompt", "a string, token ids, or a list of either that is not empty", value)
    for number, prompt in enumerate(value):
        name = f"prompt[{number}]"
        if isinstance(prompt, str):
            fields.checked_text(name, prompt)
        elif not isinstance(prompt, list) or any(type(token) is not int for token in prompt):
            raise fields.error(name, "a string or a list of token ids", prompt)
    return value
