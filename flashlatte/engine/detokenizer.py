"""Incremental detokenization, at a cost per token that does not grow with the text."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# Tokens to wait for the rest of a character before the invalid bytes before it are returned. It has at most four bytes.
_MAX_WITHHELD = 16
# Tokens after which incomplete characters are returned too. Only tokens that all end within a character get there.
_MAX_TOKENS = 64


class StopMatch(NamedTuple):
    """A stop string, and the number of characters of the text before it."""

    begin: int
    stop: str


class Detokenizer:
    """Decodes tokens one by one, and looks for stop strings.

    The text of a token depends on the tokens before it (a space, the first bytes of a character). So the tokens of the
    last complete text are decoded again together with the new ones, and the common beginning is removed. Replacement
    characters at the end are withheld, because the next bytes may complete a character.

    Args:
        tokenizer: an object with ``decode``.
        stop: strings to look for.
        skip_special_tokens: argument of ``decode``.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self._decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._stop = stop
        self._tokens: list[int] = []
        self._num_complete = 0  # leading tokens that complete their text
        self._text = ""  # of the tokens
        self._num_returned = 0  # leading characters of it that were returned
        # The end of the returned text, in which a stop string may begin, and the number of characters before it.
        self._tail, self._tail_begin = "", 0
        self._tail_length = max(map(len, stop), default=1) - 1

    def add(self, token: int) -> tuple[str, StopMatch | None]:
        """The text that a token completes (empty while bytes of a character are missing), and the first stop string
        that ends in the new text, or None.
        """
        text = self._decode([*self._tokens, token])
        if text == self._text and text.endswith(_INCOMPLETE) and not self._decode([token]):
            return "", None  # a token without text within a character
        self._tokens.append(token)
        self._text = text
        new = text.rstrip(_INCOMPLETE)[self._num_returned :]
        self._num_returned += len(new)
        num_new = len(self._tokens) - self._num_complete
        if (new and self._num_returned == len(text)) or num_new >= _MAX_TOKENS:
            new += self._complete(len(self._tokens), text)
        elif num_new >= _MAX_WITHHELD:
            new += self._complete_invalid()
        return new, self._match(new)

    def rest(self) -> str:
        """The remaining withheld text, with incomplete characters as replacement characters."""
        return self._text[self._num_returned :]

    def _complete_invalid(self) -> str:
        """Return the text of all tokens except those of the last character, which is incomplete."""
        count = len(self._tokens)
        for end in range(count - 1, max(count - 5, self._num_complete), -1):
            text = self._decode(self._tokens[:end])
            # A border within a character would make two invalid ones of it.
            if text + self._decode(self._tokens[end:]) == self._text:
                return self._complete(end, text)
        return ""

    def _complete(self, end: int, text: str) -> str:
        """Forget the tokens before those that complete the ``text`` of the first ``end`` tokens; returns the new
        text."""
        new = text[self._num_returned :]
        self._tokens = self._tokens[self._num_complete :]
        self._num_complete = end - self._num_complete
        known = self._decode(self._tokens[: self._num_complete])
        self._text = known if self._num_complete == len(self._tokens) else self._decode(self._tokens)
        self._num_returned = len(known) + max(self._num_returned - len(text), 0)
        return new

    def _match(self, new: str) -> StopMatch | None:
        visible = self._tail + new
        matches = []
        for stop in self._stop:
            begin = visible.find(stop, max(len(self._tail) - len(stop) + 1, 0))
            if begin >= 0:
                matches.append(StopMatch(self._tail_begin + begin, stop))
        tail_begin = max(len(visible) - self._tail_length, 0)
        self._tail, self._tail_begin = visible[tail_begin:], self._tail_begin + tail_begin
        return min(matches, key=lambda one: one.begin, default=None)
