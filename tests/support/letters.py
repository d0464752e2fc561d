"""Tokenizers of letters, for models with the vocabulary of ``engine_models``."""

from __future__ import annotations

from pathlib import Path

import pytest

CHAT = (
    "{% for one in messages %}{{ one.role[0] }}{{ one.content }};{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


class Letters:
    """A tokenizer with one letter per token."""

    def encode(self, text: str, **_: bool) -> list[int]:
        return [ord(letter) - 30 for letter in text]

    def decode(self, tokens: list[int], **_: bool) -> str:
        return "".join(chr(token + 30) for token in tokens)


class Pieces:
    """A tokenizer with one to three letters per token, so that texts may begin and end within tokens."""

    def decode(self, tokens: list[int], **_: bool) -> str:
        return "".join("abcd"[token % 4] * (1 + token % 3) for token in tokens)


def save_letters(path: Path, chat_template: str | None = None) -> None:
    """Save ``Letters`` as a tokenizer of transformers."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    letters = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(30 + token): token for token in range(97)}, " "))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    letters.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters, chat_template=chat_template).save_pretrained(path)
