"""Guesses of the tokens to come, without a second model: what followed the same words earlier in the text."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice

# Occurrences of the last token that are looked at: a frequent one has as many as the text is long.
_LOOKED_AT = 512


class PromptLookup:
    """Where each token stood in a request's text, so that a guess need not read the text again.

    (Prompt lookup decoding; Saxena, 2023.)
    """

    def __init__(self) -> None:
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        self._read = 0

    def guess(self, tokens: list[int], count: int, longest: int = 4) -> list[int]:
        """Up to ``count`` tokens that followed the latest earlier occurrence of the last ``longest``, or of fewer.

        Of the last token's occurrences the latest 512 count.

        Args:
            tokens: the text: that of the last call, and what came since.
        """
        last = len(tokens) - 1
        for place in range(self._read, last):
            self._places[tokens[place]].append(place)
        self._read = last
        best, most = last, 0
        for place in islice(reversed(self._places.get(tokens[last], ())), _LOOKED_AT):
            alike = 1
            while alike < min(longest, place + 1) and tokens[place - alike] == tokens[last - alike]:
                alike += 1
            if alike > most:
                best, most = place, alike
            if most == longest:
                break
        return tokens[best + 1 : best + 1 + count]
