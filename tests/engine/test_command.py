"""``flashlatte generate`` with a checkpoint directory."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from support import rank_engine_jobs
from support.engine_models import generated_by_transformers, greedy, model
from support.letters import CHAT, Letters, save_letters

from flashlatte import cli
from flashlatte.engine import Engine
from flashlatte.engine.loading import load_tokenizer


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    model("DeepseekV3").save_pretrained(tmp_path)
    monkeypatch.setattr("flashlatte.engine.command.load_tokenizer", lambda path: Letters())
    return tmp_path


def test_a_text_is_continued(checkpoint, capsys):
    assert cli.main(["generate", str(checkpoint), "--prompt", "Hello", "--max-tokens", "9"]) == 0
    output = capsys.readouterr()
    expected = Letters().decode(generated_by_transformers("DeepseekV3", Letters().encode("Hello"), 9))
    assert output.out == expected + "\n"
    assert "9 tokens in" in output.err
    assert "cache fp32" in output.err


def test_an_incomplete_character_at_the_end_is_printed(checkpoint, capsys, monkeypatch):
    tokenizer = Letters()
    # The last token's first character is complete.
    monkeypatch.setattr(
        tokenizer, "decode", lambda tokens, **_: "".join(f"({token}\N{REPLACEMENT CHARACTER}" for token in tokens)
    )
    monkeypatch.setattr("flashlatte.engine.command.load_tokenizer", lambda path: tokenizer)
    assert cli.main(["generate", str(checkpoint), "--prompt", "Hello", "--max-tokens", "3"]) == 0
    tokens = generated_by_transformers("DeepseekV3", tokenizer.encode("Hello"), 3)
    assert capsys.readouterr().out == tokenizer.decode(tokens) + "\n"


def test_stop_tokens_come_from_the_checkpoint(checkpoint, capsys):
    tokens = generated_by_transformers("DeepseekV3", Letters().encode("Hello"), 9)
    config = json.loads((checkpoint / "generation_config.json").read_text())
    (checkpoint / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [96, tokens[5]]}))
    assert cli.main(["generate", str(checkpoint), "--prompt", "Hello", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == Letters().decode(tokens[: tokens.index(tokens[5])]) + "\n"


def test_invalid_arguments_are_errors(checkpoint, capsys):
    assert cli.main(["generate", str(checkpoint / "nothing"), "--prompt", "x"]) == 2
    assert "must be the directory of a checkpoint" in capsys.readouterr().err
    assert cli.main(["generate", str(checkpoint), "--prompt", "x", "--temperature", "-1"]) == 2
    assert "temperature must be" in capsys.readouterr().err
    assert cli.main(["generate", str(checkpoint), "--prompt", "x", "--cache-format", "fp99"]) == 2
    assert "cache_format must be bf16, fp16, fp32 or fp8 for rows of 32 + 8, got 'fp99'" in capsys.readouterr().err
    (checkpoint / "binary").write_bytes(b"\xff\xfe")
    assert cli.main(["generate", str(checkpoint), "--file", str(checkpoint / "binary")]) == 2
    assert f"--file must be a text in UTF-8, and {checkpoint / 'binary'} is not" in capsys.readouterr().err
    config = json.loads((checkpoint / "config.json").read_text()) | {"model_type": "llama"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert cli.main(["generate", str(checkpoint), "--prompt", "x"]) == 2
    assert "got 'llama'" in capsys.readouterr().err


def test_a_text_from_standard_input(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hello")))
    assert cli.main(["generate", str(checkpoint), "--file", "-", "--max-tokens", "3"]) == 0
    expected = Letters().decode(generated_by_transformers("DeepseekV3", Letters().encode("Hello"), 3))
    assert capsys.readouterr().out == expected + "\n"


def test_without_a_prompt_standard_input_is_the_text(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hello")))
    assert cli.main(["generate", str(checkpoint), "--max-tokens", "3"]) == 0
    expected = Letters().decode(generated_by_transformers("DeepseekV3", Letters().encode("Hello"), 3))
    assert capsys.readouterr().out == expected + "\n"


def test_a_text_ends_before_a_stop_string(checkpoint, capsys):
    text = Letters().decode(generated_by_transformers("DeepseekV3", Letters().encode("Hello"), 9))
    arguments = ["generate", str(checkpoint), "--prompt", "Hello", "--max-tokens", "9", "--stop", "nowhere"]
    assert cli.main([*arguments, "--stop", text[4:6]]) == 0
    assert capsys.readouterr().out == text[: text.index(text[4:6])] + "\n"


def test_a_dtype_and_a_device(checkpoint, capsys):
    arguments = ["generate", str(checkpoint), "--prompt", "Hello", "--max-tokens", "3"]
    assert cli.main([*arguments, "--dtype", "bfloat16", "--device", "cpu"]) == 0
    assert "cache bf16" in capsys.readouterr().err
    for device in ("nonsense", "meta", "cuda:99"):
        assert cli.main([*arguments, "--device", device]) == 2
        assert f"got {device!r}" in capsys.readouterr().err


def test_chat_answers_each_line_of_standard_input(checkpoint, capsys, monkeypatch):
    pytest.importorskip("jinja2", reason="jinja2 is in the extra 'serve'")
    save_letters(checkpoint, CHAT)
    tokenizer = load_tokenizer(checkpoint)
    monkeypatch.setattr("flashlatte.engine.command.load_tokenizer", lambda path: tokenizer)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\nBye\n"))
    assert cli.main(["generate", str(checkpoint), "--chat", "--max-tokens", "5"]) == 0

    def answer(text):
        return Letters().decode(generated_by_transformers("DeepseekV3", Letters().encode(text), 5))

    first = answer("uHello;a")
    second = answer(f"uHello;a{first};uBye;a")
    output = capsys.readouterr()
    assert output.out == f"{first}\n{second}\n"
    assert "10 tokens in" in output.err

    assert cli.main(["generate", str(checkpoint), "--chat", "--prompt", "Hello", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == first + "\n"


def test_chat_without_a_template_is_refused(checkpoint, capsys):
    pytest.importorskip("jinja2", reason="jinja2 is in the extra 'serve'")
    assert cli.main(["generate", str(checkpoint), "--chat", "--prompt", "Hello"]) == 2
    assert "messages need a chat template, and the model's tokenizer has none" in capsys.readouterr().err


def test_only_the_first_rank_reads_the_text(checkpoint, capsys, monkeypatch):
    """Ranks share one standard input: text read by another rank would be missing."""
    text = io.TextIOWrapper(io.BytesIO(b"Hello"))
    monkeypatch.setattr("sys.stdin", text)
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["generate", str(checkpoint / "nothing"), "--file", "-"]) == 2
    assert text.read() == "Hello"


def test_nan_logits_are_an_error_with_a_reason(checkpoint, capsys):
    rank_engine_jobs.poisoned("DeepseekV3").save_pretrained(checkpoint)
    text = "Hello" + Letters().decode([rank_engine_jobs.POISON])
    assert cli.main(["generate", str(checkpoint), "--prompt", text]) == 1
    error = capsys.readouterr().err
    assert "flashlatte generate: request 'request-0' failed: no token at position 6 can be chosen: the logits" in error
    assert "Traceback" not in error


def test_files_that_cannot_be_read_are_named(checkpoint, capsys):
    missing = checkpoint / "missing.txt"
    for file, reason in ((missing, "No such file or directory"), (checkpoint, "Is a directory")):
        assert cli.main(["generate", str(checkpoint), "--file", str(file)]) == 2
        expected = f"flashlatte generate: --file must be a file that can be read, got {file}: {reason}\n"
        assert capsys.readouterr().err == expected


@pytest.mark.filterwarnings("ignore")
def test_a_truncated_checkpoint(checkpoint, capsys):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert cli.main(["generate", str(checkpoint), "--prompt", "x"]) == 2
    error = capsys.readouterr().err
    assert f"flashlatte generate: {file} must be a complete safetensors file: " in error
    assert "Traceback" not in error


def test_a_checkpoint_without_a_tokenizer_or_a_config(tmp_path, capsys):
    model("DeepseekV3").save_pretrained(tmp_path)
    capsys.readouterr()
    assert cli.main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    expected = "flashlatte generate: model must be a directory with a tokenizer, and transformers loads none from "
    assert capsys.readouterr().err.startswith(f"{expected}{tmp_path}: ")
    (tmp_path / "config.json").unlink()
    assert cli.main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert f"directory of a checkpoint, and {tmp_path} has no config.json\n" in capsys.readouterr().err


def test_a_missing_directory_is_reported_before_its_tokenizer(tmp_path, capsys):
    assert cli.main(["generate", str(tmp_path / "nothing"), "--prompt", "x"]) == 2
    assert "must be the directory of a checkpoint" in capsys.readouterr().err


def test_an_engine_takes_the_tokenizer_of_its_checkpoint(tmp_path):
    model("DeepseekV3").save_pretrained(tmp_path)
    assert Engine(tmp_path, num_pages=4).tokenizer is None
    save_letters(tmp_path)
    (output,) = Engine(tmp_path, num_pages=4).generate(["Hello"], greedy(9))
    expected = generated_by_transformers("DeepseekV3", Letters().encode("Hello"), 9)
    assert (output.prompt, output.outputs[0].text) == ("Hello", Letters().decode(expected))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"^model must be a directory with a tokenizer, and transformers loads none"):
        Engine(tmp_path, num_pages=4)


@pytest.mark.full
def test_torchrun_divides_the_model(tmp_path):
    """Two processes of ``flashlatte generate``, of which only the first prints."""
    save_letters(tmp_path)
    model("DeepseekV3").save_pretrained(tmp_path)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "flashlatte",
    ]
    arguments = ["generate", str(tmp_path), "--prompt", "Hello", "--max-tokens", "9", "--context-parallel", "2"]
    done = subprocess.run([*launch, *arguments], capture_output=True, text=True, timeout=300)
    expected = Letters().decode(generated_by_transformers("DeepseekV3", Letters().encode("Hello"), 9))
    assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr
    assert done.stderr.count("9 tokens in") == 1


def test_a_closed_standard_input_is_an_error(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert cli.main(["generate", str(checkpoint)]) == 2
    assert "--prompt, --file or standard input, which is closed" in capsys.readouterr().err


def test_a_text_without_tokens_is_refused_before_the_weights_are_loaded(checkpoint, capsys):
    (checkpoint / "model.safetensors").unlink()
    assert cli.main(["generate", str(checkpoint), "--prompt", ""]) == 2
    expected = "flashlatte generate: the text to continue must have at least one token, got none\n"
    assert capsys.readouterr().err == expected


def test_a_message_that_is_not_utf8_is_refused(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert cli.main(["generate", str(checkpoint), "--chat"]) == 2
    assert "flashlatte generate: standard input must be a text in UTF-8, and is not: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([1], "config.json must be a JSON object, and {path} has another, got list"),
        ({"num_hidden_layers": "two"}, "config.json must be one that transformers reads, and {path} has another: "),
        ({"model_type": ["x"]}, "model_type in config.json must be a str, and {path} has ['x']"),
        ({"dtype": "float99"}, "config.json must be one that transformers reads, and {path} has another: "),
        ({"rope_parameters": {"rope_type": "yarn"}}, "config.json must be one that transformers reads, and {path} has"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be at least 1, got -1"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "model must be a checkpoint that transformers can load, and {path} is not: TypeError: ",
        ),
    ],
)
def test_a_config_that_cannot_be_read_is_one_line(checkpoint, capsys, changes, message):
    file = checkpoint / "config.json"
    file.write_text(json.dumps(changes if isinstance(changes, list) else json.loads(file.read_text()) | changes))
    capsys.readouterr()
    assert cli.main(["generate", str(checkpoint), "--prompt", "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"flashlatte generate: {message.format(path=checkpoint)}")
