"""``flashlatte bench flashmla`` with a fake FlashMLA, scaled down, without a GPU; and the choice of a run's lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashlatte.flash_mla
from flashlatte import bench
from flashlatte.bench.peers import flashmla
from flashlatte.bench.results import newest_runs, read_lines

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "flashmla_in_turns.jsonl"
# A package that is not FlashLatte's own, whose functions compute with FlashLatte.
FAKE = """
import flashlatte.flash_mla as own
from flashlatte.flash_mla import get_mla_metadata

def flash_mla_with_kvcache(*args, **kwargs):
    return own.flash_mla_with_kvcache(*args, **kwargs)

def flash_mla_sparse_fwd(*args, **kwargs):
    return own.flash_mla_sparse_fwd(*args, **kwargs)
"""


@pytest.fixture(autouse=True)
def no_gpu_and_no_flash_mla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # monkeypatch removes after the test what the test imported.
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    del sys.modules["flash_mla"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "flash_mla").mkdir()
    (tmp_path / "flash_mla" / "__init__.py").write_text(FAKE)
    return tmp_path


def test_the_cases_are_those_recorded() -> None:
    recorded = newest_runs(read_lines([RECORDED]))[-1]
    counts = {op: [line["method"] for line in recorded if line["op"] == op] for op in flashmla.CASES}
    assert {op: [method for _, method in cases] for op, cases in flashmla.CASES.items()} == counts


@pytest.mark.parametrize("section", flashmla.CASES)
def test_a_line_has_the_times_of_both(section: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "lines.jsonl"
    options = ["--flash-mla", str(folder), "--flashmla-commit", "abc1234", "--section", section, "--json", str(file)]
    assert bench.run_named("flashmla", options) == 0
    found = list(read_lines([file]))
    assert found
    recorded = next(read_lines([RECORDED]))
    for line in found:
        assert set(recorded) - {"share_of_matmul", "share_of_copy", "matmul_tflops", "copy_gbps"} <= set(line)
        assert line["op"] == section
        assert line["flashmla_us"] > 0
        assert line["ratio"] == pytest.approx(line["flashmla_us"] / line["flashlatte_us"], rel=1e-2, abs=1e-3)
        assert line["flashmla_commit"] == "abc1234"
        assert line["scaled_down"] is True
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 1 + len(found)
    assert not output.err


def test_a_wrong_result_of_flashmla_has_no_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*args: Any) -> tuple[torch.Tensor, ...]:
        out, *others = flashlatte.flash_mla.flash_mla_sparse_fwd(*args)
        return (out + 1, *others)

    own = flashlatte.flash_mla
    fake = SimpleNamespace(
        get_mla_metadata=own.get_mla_metadata,
        flash_mla_with_kvcache=lambda *args, **options: own.flash_mla_with_kvcache(*args, **options),
        flash_mla_sparse_fwd=wrong,
    )
    monkeypatch.setitem(sys.modules, "flash_mla", fake)
    file = tmp_path / "lines.jsonl"
    options = ["--flashmla-commit", "abc1234", "--section", "sparse_prefill", "--json", str(file)]
    assert bench.run_named("flashmla", options) == 1
    assert not file.exists()
    assert "of flashmla is wrong: out" in capsys.readouterr().err


def test_a_missing_flash_mla_and_flashlattes_own_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--flash-mla", str(tmp_path), "--flashmla-commit", "abc1234"]
    with pytest.raises(SystemExit):
        bench.run_named("flashmla", options)
    assert "--flash-mla must name the folder of FlashMLA's package flash_mla" in capsys.readouterr().err
    flashlatte.flash_mla.install_alias(tmp_path)
    with pytest.raises(SystemExit):
        bench.run_named("flashmla", options)
    assert "forwards to FlashLatte" in capsys.readouterr().err


def line_of(device: str, commit: str, date: str, case: str, us: float = 1.0) -> dict[str, Any]:
    about = {
        "op": "dense_decode",
        "case": case,
        "method": "device",
        "flashmla_us": us,
        "flashlatte_us": 1.0,
        "ratio": us,
    }
    return about | {"device": device, "commit": commit, "flashmla_commit": "f", "date": date}


def test_the_newest_run_of_each_device_is_chosen() -> None:
    old = [line_of("H100", "a", "2026-11-01", case) for case in "xy"]
    newer = [line_of("H200", "b", "2026-11-02", case) for case in "xy"]
    newest = [line_of("H100", "c", "2026-11-03", case) for case in "xy"]
    again = line_of("H100", "c", "2026-11-03", "x", 2.0)
    assert newest_runs([*newest, *old, again, *newer]) == [newer, [again, newest[1]]]
    # Of one day the later lines are the newer.
    other = [line_of("H200", "d", "2026-11-03", "x")]
    assert newest_runs([*newest, *other]) == [newest, other]


def test_the_picture_shows_the_newest_run_of_a_device(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    assert matplotlib
    from flashlatte.bench.pictures.flashmla import draw

    recorded = newest_runs(read_lines([RECORDED]))[-1]
    second = [
        line | {"device": "NVIDIA H200", "ratio": 2.5, "commit": "fedcba9", "date": "2099-01-01"} for line in recorded
    ]
    title = draw([*second, *recorded])._suptitle.get_text()  # pyright: ignore[reportAttributeAccessIssue]
    assert "one NVIDIA H200" in title
    assert f"{len(recorded)} of {len(recorded)} cases, geometric mean 2.500" in title
    file, picture = tmp_path / "lines.jsonl", tmp_path / "picture.png"
    file.write_text("".join(json.dumps(line) + "\n" for line in [*recorded, *second]))
    options = ["flashmla", "--data", str(file), "--picture", str(picture), "--device"]
    assert bench.run_named("plot", [*options, recorded[0]["device"]]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        bench.run_named("plot", [*options, "B200"])
