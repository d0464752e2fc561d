"""The demo: its table, exit codes, and errors for invalid arguments."""

import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from support import engine_models

from flashlatte import cli
from flashlatte.demo import demo, run_demo
from flashlatte.demo.model import ByteTokenizer
from flashlatte.demo.runs import Run, logits_of_engine, logits_of_transformers, overlap
from flashlatte.engine.model_factory import create_model


@pytest.fixture(scope="module")
def printed():
    """The demo's output and exit code, in a separate process."""
    pytest.importorskip("transformers")
    pytest.importorskip("rich")
    code = "import sys; from flashlatte.demo import run_demo; sys.exit(run_demo(device='cpu'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout, done.stderr, done.returncode


def rows_of(output):
    """The table's rows as lists of cells, by their first cell."""
    lines = [line for line in output.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return {row[0].partition(",")[0]: row[1:] for row in cells}


@pytest.mark.full
def test_the_demo_succeeds_and_compares_every_cache(printed):
    output, errors, code = printed
    assert (code, errors) == (0, "")
    rows = rows_of(output)
    assert list(rows) == ["stock", "fp32", "bf16", "v32"]
    layers, heads = 3, 8
    sizes = {"fp32": layers * 576 * 4, "bf16": layers * 576 * 2, "v32": layers * 656}
    for name, size in sizes.items():
        cache_bytes, ratio, _, speed = rows[name]
        expanded = layers * heads * (192 + 128) * (4 if name == "fp32" else 2)
        assert int(cache_bytes) == size
        assert ratio == f"1/{expanded / size:.1f}"
        assert float(speed) > 0
    assert rows["fp32"][2] == "ok: 64 of 64 the same"
    differences = [float(rows[name][2].removeprefix("ok: logits within ")) for name in ("bf16", "v32")]
    # Formats that round more differ more.
    assert 0 < differences[0] < differences[1] <= 2


@pytest.mark.full
def test_progress_bars_complete(printed):
    for line in ("stock transformers", "FlashLatte, fp32 cache", "FlashLatte, bf16 cache", "FlashLatte, v32 cache"):
        assert any(line in shown and "128/128" in shown for shown in printed[0].splitlines())


@pytest.mark.full
def test_the_text_is_readable_and_not_degenerate(printed):
    text = printed[0].partition("as random weights do:")[2].partition("DeepseekV3: stock")[0]
    written = "".join(line.strip() for line in text.split("\n"))
    assert re.fullmatch(r"[A-Za-z ]+", written)
    assert len(set(written)) > 15


@pytest.mark.full
def test_it_starts_with_a_description(printed):
    assert printed[0].startswith("A small DeepseekV3 with random weights, in float32 on cpu, continues prompt.txt")


@pytest.mark.parametrize(("same", "difference", "code"), [(64, 1e-5, 0), (63, 1e-5, 1), (64, 0.5, 1)])
def test_a_comparison_that_fails_gives_exit_code_1(monkeypatch, capsys, same, difference, code):
    pytest.importorskip("transformers")
    pytest.importorskip("rich")
    run = Run(torch.arange(64), 10.0)
    row = demo.Row(demo.CHOICES[0], run, same, difference)
    monkeypatch.setattr(demo, "_compare", lambda *_: (run, [row]))
    assert run_demo(device="cpu") == code
    assert ("FAILED" in capsys.readouterr().out) == (code == 1)


def test_a_selection_that_differs_too_much_fails():
    run = Run(torch.arange(64), 10.0)
    overlaps = (0.999, 0.96, 0.97, 1.0)
    rows = [
        demo.Row(demo.INDEXED_CHOICES[index], run, 64, 0.0, overlap)
        for index, overlap in zip((0, 1, 1, 0), overlaps, strict=True)
    ]
    assert [row.passed for row in rows] == [False, False, True, True]


@pytest.mark.parametrize("family", ["DeepseekV3", "DeepseekV4"])
def test_logits_are_compared_for_the_same_tokens(family):
    pytest.importorskip("transformers")
    model, prompt, tokens = engine_models.model(family), [5, 3, 8, 1, 2], torch.tensor([4, 9, 7])
    expected = logits_of_transformers(model, prompt, tokens, lambda: None)
    found = logits_of_engine(create_model(model), "fp32", prompt, tokens, lambda: None)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_overlap_is_the_fraction_of_expected_tokens():
    made, expected = [frozenset({1, 2, 3}), frozenset({4})], [frozenset({2, 3, 9}), frozenset({4})]
    assert overlap(made, expected) == 0.75


@pytest.mark.full
def test_the_demo_of_a_model_with_an_indexer(capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("rich")
    assert run_demo(device="cpu", model="v3.2") == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows["fp32"][0] == str(3 * (576 + 128) * 4)
    assert rows["v32"][0] == str(3 * (656 + 132))
    assert rows["fp32"][2].startswith("ok: 64 of 64 the same")


@pytest.mark.full
def test_the_demo_of_deepseek_v4(capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("rich")
    assert run_demo(device="cpu", model="v4") == 0
    output = capsys.readouterr().out
    rows = rows_of(output)
    assert list(rows) == ["stock", "fp32", "model1"]
    # A row for the window in each of three layers, and of the two ratios a 128th and a fourth with its index key.
    assert rows["fp32"][0] == str(3 * 2048 + 2048 // 128 + (2048 + 128 * 4) // 4)
    assert rows["model1"][0] == str(round(3 * 584 + 584 / 128 + (584 + 132) / 4))
    assert rows["fp32"][2] == "ok: 64 of 64 the same"
    assert 0 < float(rows["model1"][2].removeprefix("ok: logits within ")) <= 2
    text = output.partition("as random weights do:")[2].partition("DeepseekV4: stock")[0]
    assert len(set("".join(line.strip() for line in text.split("\n")))) > 15


def test_only_the_float32_cache_must_give_every_token():
    run = Run(torch.arange(64), 10.0)
    assert [demo.Row(choice, run, 3, 0.0).passed for choice in demo.CHOICES] == [False, True, True]


def test_user_errors_print_one_line_and_exit_with_2(capsys, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "long.txt").write_text("x" * 2049)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"prompt_file": tmp_path / "none.txt"}, "cannot be read: .*none.txt: No such file"),
        ({"prompt_file": tmp_path}, "cannot be read: .*: Is a directory"),
        ({"prompt_file": tmp_path / "empty.txt"}, "is empty"),
        ({"prompt_file": tmp_path / "long.txt"}, "long.txt must have at most 2048 bytes, and has 2049"),
        ({"prompt": " "}, "the prompt is empty"),
        ({"prompt": "é" * 1025}, "at most 2048 bytes, and has 2050"),
        ({"new_tokens": 63}, "from 64 to 1024, got 63"),
        ({"new_tokens": 1025}, "from 64 to 1024, got 1025"),
        ({"device": "abacus"}, "--device must be cuda or cpu, got 'abacus', which cannot be used"),
        ({"device": "cuda:99"}, "--device must be cuda or cpu, got 'cuda:99', which cannot be used"),
        ({"device": "meta"}, "--device must be cuda or cpu, got 'meta', which cannot be used"),
        ({"model": "v5"}, "--model must be one of v3, v3.2, v4, got v5"),
    )
    for arguments, message in cases:
        assert run_demo(**arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("flashlatte demo: ")
        assert re.search(message, err)


def test_the_text_to_continue(monkeypatch, tmp_path):
    begins: list[bytes] = []
    monkeypatch.setattr(demo, "_run", lambda begin, *_: begins.append(begin) or 0)
    (tmp_path / "text.txt").write_text("from a file", encoding="utf-8")
    cli.main(["demo", "--prompt", "a text"])
    cli.main(["demo", "--file", str(tmp_path / "text.txt")])
    cli.main(["demo"])
    assert begins[:2] == [b"a text", b"from a file"]
    assert len(begins[2]) == 310


@pytest.mark.parametrize("missing", ["rich", "transformers"])
def test_a_missing_extra_is_named(monkeypatch, capsys, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    assert run_demo() == 2
    assert "pip install 'flashlatte[transformers]'" in capsys.readouterr().err


def test_bytes_are_tokens():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("añ\n".encode())
    assert ids == [tokenizer.bos_token_id, 97, 195, 177, 10]
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id]) == "añ\n".encode()
    assert tokenizer.vocabulary == tokenizer.pad_token_id + 1
