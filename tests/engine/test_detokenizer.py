"""Incremental detokenization gives the text of all tokens, at a constant cost per token."""

from __future__ import annotations

import pytest
from hypothesis import given
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


@pytest.mark.parametrize(("token", "most"), [(ord("x"), 4), (0x80, 64), (256, 64)])
def test_the_last_token_costs_as_much_as_the_first(token, most):
    """Also if no character is ever complete, or tokens have no text."""
    tokenizer = Bytes()
    text = Detokenizer(tokenizer, ["never here"])
    given_out = "".join(text.add(token)[0] for _ in range(1000))
    assert tokenizer.decoded < most * 1000
    assert len(given_out) >= (0 if token == 256 else 980)
