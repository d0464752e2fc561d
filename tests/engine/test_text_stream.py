"""Streamed text adds up to the final text, and never contains part of a stop string."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flashlatte.engine import CompletionOutput, SamplingParams
from flashlatte.engine.text_stream import TextStream

END = 257


class Bytes:
    """A byte tokenizer, whose tokens from 256 on are special."""

    def decode(self, tokens: list[int], **_: bool) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


def output(**options: Any) -> CompletionOutput:
    return CompletionOutput(0, SamplingParams(max_tokens=400, **options), 1, Bytes())


@given(
    words=st.lists(st.sampled_from(["a", "b", "ab", " ", "é", "語", "🙂"]), min_size=1, max_size=16),
    stops=st.lists(st.sampled_from(["ab", "b a", "語a", "aé", "ba b"]), max_size=2),
    sizes=st.lists(st.integers(1, 5), min_size=80, max_size=80),
    includes=st.booleans(),
    ends=st.booleans(),
)
def test_the_parts_are_the_text_and_each_is_final(words, stops, sizes, includes, ends):
    tokens = [*"".join(words).encode(), *([END] if ends else [])]
    generated = output(stop=stops, stop_token_ids=[END], include_stop_str_in_output=includes)
    stream, parts, read = TextStream(generated), list[str](), 0
    for token in tokens:
        generated.finish_reason = generated.extend([token], [], [])
        # A reader may be slower than the tokens.
        if len(generated.token_ids) - read >= sizes[len(parts)] or generated.finish_reason is not None:
            read = len(generated.token_ids)
            parts.append(stream.update(generated))
        if generated.finish_reason is not None:
            break
    else:
        generated.finish_reason = "length"
        parts.append(stream.update(generated))
    assert "".join(parts) == generated.text
    assert stream.update(generated) == ""


class ByteFallback:
    """A tokenizer that replaces all bytes of a run if one is invalid, as "ByteFallback" of the package tokenizers."""

    def decode(self, tokens: list[int], **_: bool) -> str:
        text = bytes(tokens)
        try:
            return text.decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(text)


def test_the_parts_are_the_text_if_later_tokens_change_earlier_characters():
    for stop in ((), ("b",)):
        generated = CompletionOutput(0, SamplingParams(max_tokens=400, stop=stop), 1, ByteFallback())
        stream, parts = TextStream(generated), []
        for token in [*"a語".encode(), 0xFF, *b"abc"]:
            generated.finish_reason = generated.extend([token], [], [])
            parts.append(stream.update(generated))
            if generated.finish_reason:
                break
        else:
            generated.finish_reason = "length"
        assert "".join([*parts, stream.update(generated)]) == generated.text
        assert generated.text.startswith("a語")


def test_only_possible_beginnings_of_a_stop_string_are_withheld():
    generated = output(stop=["END"])
    stream, parts = TextStream(generated), []
    for letter in "some EN, then EN":
        generated.extend([ord(letter)], [], [])
        parts.append(stream.update(generated))
    assert "".join(parts) == "some EN, then "
    generated.finish_reason = "length"
    assert stream.update(generated) == "EN"
