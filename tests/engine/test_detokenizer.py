"""Incremental detokenization gives the text of all tokens, at a constant cost per token."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flashlatte.engine.detokenizer import Detokenizer


class Bytes:
    """A byte tokenizer, with a token 256 that has no text; a space at the start of a text is not shown."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, tokens: list[int], **_: bool) -> str:
        self.decoded += len(tokens)
        return bytes(token for token in tokens if token < 256).decode(errors="replace").removeprefix(" ")


@given(words=st.lists(st.sampled_from(["a", "b", "ab", " ", " b", "é", "語", "🙂"]), max_size=20), data=st.data())
def test_texts_add_up_and_a_stop_is_seen_with_its_last_byte(words, data):
    tokens = list("".join(words).encode())
    for place in data.draw(st.lists(st.integers(0, len(tokens)), max_size=3)):
        tokens.insert(place, 256)
    stops = data.draw(st.lists(st.sampled_from(["ab", "b a", "語", "aé", "b"]), max_size=2))
    text, given_out = Detokenizer(Bytes(), stops), ""
    for count, token in enumerate(tokens, 1):
        new, stopped = text.add(token)
        given_out += new
        known = Bytes().decode(tokens[:count])
        assert given_out == known.rstrip("\N{REPLACEMENT CHARACTER}")
        assert given_out + text.rest() == known
        assert (stopped is not None) == any(stop in known for stop in stops)
        if stopped:
            assert known[stopped.begin :].startswith(stopped.stop)
            return


# Tokens of a byte-level tokenizer that begin or end within a character, and a special one.
PIECES = (
    b"a",
    b" b",
    "é".encode(),
    b"\xe4",
    b"\xb8",
    b"\xad",
    b"\x80",
    b"\xff",
    b"ab\xe4",
    b"\xad \xe4",
    b"\xf0\x9f\x99",
    b"",
)


class Pieces:
    def decode(self, tokens: list[int], **_: bool) -> str:
        return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


@given(runs=st.lists(st.tuples(st.lists(st.integers(0, len(PIECES) - 1), max_size=3), st.integers(1, 20)), max_size=6))
@example(runs=[([6], 16), ([3, 4, 5, 0], 1)])  # a character after invalid bytes
@example(runs=[([3], 1), ([11], 20), ([4, 5], 1)])  # special tokens within a character
@example(runs=[([8, 9], 9), ([0], 1)])
def test_invalid_bytes_do_not_change_the_characters_after_them(runs):
    tokens = [token for tokens, count in runs for token in tokens * count]
    text = Detokenizer(Pieces())
    assert "".join([*(text.add(token)[0] for token in tokens), text.rest()]) == Pieces().decode(tokens)


def test_a_stop_string_is_not_seen_in_an_incomplete_character():
    text = Detokenizer(Bytes(), ["\N{REPLACEMENT CHARACTER}"])
    assert [text.add(token)[1] for token in "語a".encode()] == [None] * 4
    assert [text.add(token)[1] is not None for token in (0xE8, ord("b"))] == [False, True]


@pytest.mark.parametrize(("token", "most"), [(ord("x"), 4), (0x80, 64), (256, 64)])
def test_the_last_token_costs_as_much_as_the_first(token, most):
    """Also if no character is ever complete, or tokens have no text."""
    tokenizer = Bytes()
    text = Detokenizer(tokenizer, ["never here"])
    given_out = "".join(text.add(token)[0] for _ in range(1000))
    assert tokenizer.decoded < most * 1000
    assert len(given_out) >= (0 if token == 256 else 980)
