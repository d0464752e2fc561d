"""Guesses of the tokens to come, without a second model: what followed the same words earlier in the text."""

from __future__ import annotations

from collections.abc import Sequence


def look_up(tokens: Sequence[int], count: int, longest: int = 4) -> list[int]:
    """Up to ``count`` tokens that followed the latest earlier occurrence of the last ``longest`` tokens, or of fewer.

    (Prompt lookup decoding; Saxena, 2023.)
    """
    if count < 1:
        return []
    for length in range(min(longest, len(tokens) - 1), 0, -1):
        pattern = list(tokens[-length:])
        for begin in range(len(tokens) - length - 1, -1, -1):
            if tokens[begin] == pattern[0] and list(tokens[begin : begin + length]) == pattern:
                return list(tokens[begin + length : begin + length + count])
    return []
