"""``flashlatte generate`` on a checkpoint in a directory."""

from __future__ import annotations

import json

import pytest
from support.engine_models import generated_by_transformers, model

from flashlatte import cli


class Letters:
    """A tokenizer of one letter a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 30 for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(token + 30) for token in tokens)


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    model("DeepseekV3").save_pretrained(tmp_path)
    monkeypatch.setattr("flashlatte.engine.command._tokenizer", lambda path: Letters())
    return tmp_path


def test_a_text_is_continued(checkpoint, capsys):
    assert cli.main(["generate", str(checkpoint), "--prompt", "Hello", "--new-tokens", "9"]) == 0
    output = capsys.readouterr()
    expected = Letters().decode(generated_by_transformers("DeepseekV3", Letters().encode("Hello"), 9))
    assert output.out == expected + "\n"
    assert "9 tokens in" in output.err
    assert "cache fp32" in output.err


def test_mistakes_are_errors_with_words(checkpoint, capsys):
    assert cli.main(["generate", str(checkpoint / "nothing"), "--prompt", "x"]) == 2
    assert "must be the directory of a checkpoint" in capsys.readouterr().err
    assert cli.main(["generate", str(checkpoint), "--prompt", "x", "--temperature", "-1"]) == 2
    assert "temperature must be" in capsys.readouterr().err
    assert cli.main(["generate", str(checkpoint), "--prompt", "x", "--cache-format", "fp99"]) == 2
    assert "cache_format must be one of" in capsys.readouterr().err
    (checkpoint / "binary").write_bytes(b"\xff\xfe")
    assert cli.main(["generate", str(checkpoint), "--file", str(checkpoint / "binary")]) == 2
    assert f"--file must be a text in UTF-8, and {checkpoint / 'binary'} is not" in capsys.readouterr().err
    config = json.loads((checkpoint / "config.json").read_text()) | {"model_type": "llama"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert cli.main(["generate", str(checkpoint), "--prompt", "x"]) == 2
    assert "got 'llama'" in capsys.readouterr().err
