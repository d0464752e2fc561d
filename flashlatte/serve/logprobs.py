"""The two forms in which the API returns log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flashlatte.engine.logprobs import Logprob

# JSON has no -inf. OpenAI writes this.
_MIN_LOGPROB = -9999.0


class ScoredToken(NamedTuple):
    """A token, its text, and the log-probabilities of it and of the most likely ones, by token; None for the first
    token of a prompt.
    """

    token: int
    text: str
    logprobs: dict[int, Logprob] | None


def completion_logprobs(tokens: Sequence[ScoredToken], offset: int) -> dict[str, Any]:
    """The form of completions.

    Args:
        offset: number of characters of the text before the first token.
    """
    values: list[float | None] = []
    top: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token, text, logprobs in tokens:
        offsets.append(offset)
        offset += len(text)
        if logprobs is None:
            values.append(None)
            top.append(None)
        else:
            values.append(_finite(logprobs[token]))
            # If several tokens have the same text, keep the most likely one.
            ranked = sorted(logprobs.values(), key=lambda one: one.rank, reverse=True)
            top.append({one.decoded_token or "": _finite(one) for one in ranked})
    texts = [one.text for one in tokens]
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def chat_logprobs(tokens: Sequence[ScoredToken], num_top: int) -> dict[str, Any]:
    """The form of chat, with the ``num_top`` most likely tokens at each position."""
    content = []
    for token, _, logprobs in tokens:
        assert logprobs is not None
        ranked = sorted(logprobs.values(), key=lambda one: one.rank)
        content.append(_chat_entry(logprobs[token]) | {"top_logprobs": list(map(_chat_entry, ranked[:num_top]))})
    return {"content": content, "refusal": None}


def _chat_entry(one: Logprob) -> dict[str, Any]:
    text = one.decoded_token or ""
    # A token that is part of a character has no text.
    data = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return {"token": text, "logprob": _finite(one), "bytes": data}


def _finite(one: Logprob) -> float:
    return max(one.logprob, _MIN_LOGPROB)
