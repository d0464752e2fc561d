"""Incremental detokenization, at a cost per token that does not grow with the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Tokens to wait for the rest of a character. It has at most four bytes, but some tokens have no bytes.
_MAX_TOKENS_OF_CHARACTER = 16


class Detokenizer:
    """Decodes tokens one by one, and looks for stop strings.

    The text of a token depends on the tokens before it (a space, the first bytes of a character). So the tokens that
    completed the last text are decoded again together with the new ones, and the common beginning is removed. Bytes
    that form no character for too long are returned as the replacement character.

    Args:
        tokenizer: an object with ``decode``.
        stop: strings to look for.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = tokenizer.decode, stop
        self._tokens: list[int] = []
        self._num_complete = 0  # leading tokens whose text was returned
        # The end of the text, in which a stop string may begin.
        self._tail, self._tail_length = "", max(map(len, stop), default=1) - 1

    def add(self, token: int) -> tuple[str, bool]:
        """The text that a token completes (empty while bytes of a character are missing), and whether a stop string
        is in the text.
        """
        self._tokens.append(token)
        known = self._decode(self._tokens[: self._num_complete])
        new = self._decode(self._tokens)[len(known) :]
        visible = self._tail + new
        stops = any(stop in visible for stop in self._stop)
        incomplete = not new or new.endswith("\N{REPLACEMENT CHARACTER}")
        if incomplete and len(self._tokens) - self._num_complete < _MAX_TOKENS_OF_CHARACTER:
            return "", stops
        self._tokens = self._tokens[self._num_complete :]
        self._num_complete = len(self._tokens)
        self._tail = visible[max(len(visible) - self._tail_length, 0) :]
        return new, stops

    def rest(self) -> str:
        """The text that was held back at the end, with incomplete characters as replacement characters."""
        return self._decode(self._tokens)[len(self._decode(self._tokens[: self._num_complete])) :]
