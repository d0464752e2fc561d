"""The examples run unchanged; each checks its own result."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


# Training takes ten seconds.
SLOW = ("train_dsa",)
MARKED = [pytest.param(path, marks=pytest.mark.full) if path.stem in SLOW else path for path in EXAMPLES]


@pytest.mark.parametrize("example", MARKED, ids=lambda path: path.stem)
def test_the_example_runs(example, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out
