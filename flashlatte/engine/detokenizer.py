"""Incremental detokenization, at a cost per token that does not grow with the text."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

# Tokens to wait for the rest of a character. It has at most four bytes, but some tokens have no bytes.
_MAX_TOKENS_OF_CHARACTER = 16


class StopMatch(NamedTuple):
    """A stop string, and the number of characters of the text before it."""

    begin: int
    stop: str


class Detokenizer:
    """Decodes tokens one by one, and looks for stop strings.

    The text of a token depends on the tokens before it (a space, the first bytes of a character). So the tokens that
    completed the last text are decoded again together with the new ones, and the common beginning is removed. Bytes
    that form no character for too long are returned as the replacement character.

    Args:
        tokenizer: an object with ``decode``.
        stop: strings to look for.
        skip_special_tokens: argument of ``decode``.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self._decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._stop = stop
        self._tokens: list[int] = []
        self._num_complete = 0  # leading tokens whose text was returned
        # The end of the text, in which a stop string may begin, and the number of characters before it.
        self._tail, self._tail_begin = "", 0
        self._tail_length = max(map(len, stop), default=1) - 1

    def add(self, token: int) -> tuple[str, StopMatch | None]:
        """The text that a token completes (empty while bytes of a character are missing), and the first stop string
        that ends in the new text, or None.
        """
        self._tokens.append(token)
        known = self._decode(self._tokens[: self._num_complete])
        new = self._decode(self._tokens)[len(known) :]
        visible = self._tail + new
        matches = []
        for stop in self._stop:
            begin = visible.find(stop, max(len(self._tail) - len(stop) + 1, 0))
            if begin >= 0:
                matches.append(StopMatch(self._tail_begin + begin, stop))
        match = min(matches, key=lambda one: one.begin, default=None)
        incomplete = not new or new.endswith("\N{REPLACEMENT CHARACTER}")
        if incomplete and len(self._tokens) - self._num_complete < _MAX_TOKENS_OF_CHARACTER:
            return "", match
        self._tokens = self._tokens[self._num_complete :]
        self._num_complete = len(self._tokens)
        tail_begin = max(len(visible) - self._tail_length, 0)
        self._tail, self._tail_begin = visible[tail_begin:], self._tail_begin + tail_begin
        return new, match

    def rest(self) -> str:
        """The remaining withheld text, with incomplete characters as replacement characters."""
        return self._decode(self._tokens)[len(self._decode(self._tokens[: self._num_complete])) :]
