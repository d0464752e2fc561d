"""Draft tokens without a draft model: the tokens that followed the same n-gram earlier in the text."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice

# Maximum number of earlier occurrences of the last token that are compared; a frequent token may have many.
_MAX_CANDIDATES = 512


class PromptLookup:
    """An index of the positions of each token in a request's text, so that a proposal does not scan the text.

    (Prompt lookup decoding; Saxena, 2023.)
    """

    def __init__(self) -> None:
        self._positions: defaultdict[int, list[int]] = defaultdict(list)
        self._num_indexed = 0

    def propose(self, tokens: list[int], count: int, max_ngram: int = 4) -> list[int]:
        """Up to ``count`` tokens that followed the latest earlier occurrence of the longest n-gram that ends the text.

        The n-gram has up to ``max_ngram`` tokens. The latest 512 occurrences of the last token are compared.

        Args:
            tokens: the text. It extends the text of the previous call.
        """
        last = len(tokens) - 1
        for position in range(self._num_indexed, last):
            self._positions[tokens[position]].append(position)
        self._num_indexed = last
        best, best_length = last, 0
        for position in islice(reversed(self._positions.get(tokens[last], ())), _MAX_CANDIDATES):
            length = 1
            while length < min(max_ngram, position + 1) and tokens[position - length] == tokens[last - length]:
                length += 1
            if length > best_length:
                best, best_length = position, length
            if best_length == max_ngram:
                break
        return tokens[best + 1 : best + 1 + count]
