"""The fields that completions and chat have in common: sampling, and options of the response."""

from __future__ import annotations

from typing import Any

from flashlatte.engine.sampling_params import SamplingParams
from flashlatte.serve.errors import ApiError, field_error
from flashlatte.serve.fields import MAX_ENTRIES, Fields

# OpenAI's limits of n, and vLLM's of log-probabilities.
MAX_N, MAX_LOGPROBS = 128, 20
MAX_STOPS, MAX_STOP_LENGTH = 16, 1024
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
_TOKEN_LISTS = ("stop_token_ids", "allowed_token_ids", "suppress_tokens")
# Fields that do not change the output.
_NO_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key")


def read_sampling(fields: Fields) -> dict[str, Any]:
    """Arguments of ``SamplingParams``, without ``max_tokens`` and ``logprobs``. OpenAI's and vLLM's fields."""
    values: dict[str, Any] = {name: fields.number(name) for name in _NUMBERS}
    values |= {name: fields.flag(name) for name in _FLAGS}
    values |= {name: fields.token_ids(name) for name in _TOKEN_LISTS}
    values |= {
        "n": fields.integer("n", 1, MAX_N),
        "min_tokens": fields.integer("min_tokens", 0),
        "top_k": fields.integer("top_k", -1),
        "seed": fields.integer("seed", 0, 2**63 - 1),
        "stop": fields.texts("stop", MAX_STOPS, MAX_STOP_LENGTH),
        "bad_words": fields.texts("bad_words", MAX_STOPS, MAX_STOP_LENGTH),
        "logit_bias": _logit_bias(fields),
    }
    return {name: value for name, value in values.items() if value is not None}


def sampling_params(
    values: dict[str, Any], room: int, max_tokens: int | None, default: int, name: str
) -> SamplingParams:
    """The parameters of a request.

    Args:
        room: tokens that fit the context after the prompt.
        max_tokens: the request's limit; None: ``default``, or ``room`` if that is less.
        name: name of the request's field for ``max_tokens``.
    """
    if max_tokens is not None and max_tokens > room:
        raise ApiError(
            400,
            f"{name} must be at most {room} after this prompt, got {max_tokens}",
            param=name,
            code="context_length_exceeded",
        )
    try:
        return SamplingParams(**values, max_tokens=min(default, room) if max_tokens is None else max_tokens)
    except (TypeError, ValueError) as error:
        raise field_error(error, values) from error


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """Whether the response is streamed, and whether the stream ends with the usage."""
    stream, options = bool(fields.flag("stream")), fields.fields("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise ApiError(400, "stream_options needs stream", param="stream_options")
    include_usage = bool(options.flag("include_usage"))
    options.unsupported("include_obfuscation", False)
    options.finish()
    return stream, include_usage


def read_rest(fields: Fields) -> str:
    """Check all other fields; returns ``cache_salt``."""
    salt = fields.text("cache_salt") or ""
    for name in _NO_EFFECT:
        fields.take(name)
    fields.unsupported("store", False)
    fields.unsupported("service_tier", "auto", "default")
    fields.finish()
    return salt


def _logit_bias(fields: Fields) -> dict[int, float] | None:
    biases = fields.fields("logit_bias")
    if biases is None:
        return None
    found: dict[int, float] = {}
    items = biases.remaining()
    if len(items) > MAX_ENTRIES:
        raise fields.error("logit_bias", f"an object of at most {MAX_ENTRIES} tokens", items)
    entries = Fields(items, "logit_bias")
    for name in items:
        if not (name.isascii() and name.isdecimal() and len(name) < 20):
            raise fields.error("logit_bias", "an object whose names are token ids", name)
        bias = entries.number(name)
        if bias is None or not -100 <= bias <= 100:
            raise entries.error(name, "a number from -100 to 100", bias)
        found[int(name)] = bias
    return found
