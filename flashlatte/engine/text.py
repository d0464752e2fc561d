"""The text of tokens as they come, at a cost that does not grow with what came before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Tokens that a letter is waited for: it has at most four bytes, but there are tokens without any.
_LONGEST_LETTER = 16


class Text:
    """Decodes tokens one by one, and watches for stops.

    What a token adds depends on the tokens before it: a space, the first bytes of its letter. So the last tokens that
    completed a text are decoded once more with those that follow, and what they have in common is not new. Bytes that
    make no letter for too long are given out as the replacement character.

    Args:
        tokenizer: with ``decode``.
        stop: texts to watch for.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = tokenizer.decode, stop
        self._tokens: list[int] = []
        self._complete = 0  # of the tokens, those whose text was given out
        # The end of the text, in which a stop may have begun.
        self._end, self._kept = "", max(map(len, stop), default=1) - 1

    def add(self, token: int) -> tuple[str, bool]:
        """The text that a token completes, empty where bytes of a letter are missing; and whether a stop is there."""
        self._tokens.append(token)
        known = self._decode(self._tokens[: self._complete])
        new = self._decode(self._tokens)[len(known) :]
        seen = self._end + new
        stops = any(stop in seen for stop in self._stop)
        waits = not new or new.endswith("\N{REPLACEMENT CHARACTER}")
        if waits and len(self._tokens) - self._complete < _LONGEST_LETTER:
            return "", stops
        self._tokens = self._tokens[self._complete :]
        self._complete = len(self._tokens)
        self._end = seen[max(len(seen) - self._kept, 0) :]
        return new, stops

    def rest(self) -> str:
        """What was waited for, of a text that ends here: a letter without all its bytes is a replacement character."""
        return self._decode(self._tokens)[len(self._decode(self._tokens[: self._complete])) :]
