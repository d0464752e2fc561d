"""Draft tokens of prompt lookup are those of a search of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashlatte.engine.prompt_lookup import PromptLookup


def searched(tokens: list[int], count: int, longest: int) -> list[int]:
    for length in range(min(longest, len(tokens) - 1), 0, -1):
        for begin in range(len(tokens) - length - 1, -1, -1):
            if tokens[begin : begin + length] == tokens[-length:]:
                return tokens[begin + length : begin + length + count]
    return []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.data())
def test_the_latest_longest_match_is_proposed(tokens, data):
    lookup, known = PromptLookup(), 0
    while known < len(tokens):
        known = data.draw(st.integers(known + 1, len(tokens)))
        count, longest = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
        assert lookup.propose(tokens[:known], count, longest) == searched(tokens[:known], count, longest)


def test_few_occurrences_of_a_frequent_token_are_compared():
    """The last token is at every second position, but never in the current context: its last four tokens are new."""
    reads = 0

    class Counted(list):
        def __getitem__(self, place):
            nonlocal reads
            reads += 1
            return super().__getitem__(place)

    tokens = Counted([7, 3] * 20_000 + [7, 7, 7, 7])
    lookup = PromptLookup()
    lookup.propose(tokens, 3)
    reads = 0
    lookup.propose(tokens, 3)
    assert reads < 10_000
