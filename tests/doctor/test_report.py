"""``flashlatte doctor --report`` on a machine without a GPU."""

from __future__ import annotations

import functools
import getpass
import json
import socket
import sys
from pathlib import Path

import pytest
import torch

from flashlatte import cli
from flashlatte.bench import problems
from flashlatte.doctor import cases, hardware
from flashlatte.doctor.private import without_private
from flashlatte.doctor.worker import CaseProcess
from flashlatte.runtime import machine

CPU = torch.device("cpu")
MERGE = problems.MergeStates(4, heads=2)
# In Triton's interpreter.
QUICK = ("index_query", "merge_states", "topk")
needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="runs the cases of a machine without a GPU")


def test_a_result_within_its_tolerance():
    entry = cases.run_case(MERGE, "reference", CPU)
    assert (entry["status"], entry["message"], entry["microseconds"]) == ("ok", None, None)
    assert (entry["operation"], entry["backend"]) == ("merge_states", "reference")
    assert set(entry["outputs"]) == {"out", "lse"}
    assert all(0 <= one["error"] <= one["allowed"] for one in entry["outputs"].values())


@pytest.mark.parametrize(("value", "error"), [(1.0, True), (torch.nan, False)])
def test_a_wrong_result_is_reported_with_its_error(monkeypatch, value, error):
    prepare = cases.prepare

    def prepare_wrong(problem, device):
        workload = prepare(problem, device)
        results = workload.reference()
        results["out"][1, 1, 7] += value
        monkeypatch.setattr(workload, "run", lambda *_: results)
        return workload

    monkeypatch.setattr(cases, "prepare", prepare_wrong)
    entry = cases.run_case(MERGE, "reference", CPU)
    assert entry["status"] == "wrong"
    assert "out" in entry["message"]
    out = entry["outputs"]["out"]
    assert out["error"] > out["allowed"] if error else out["error"] is None
    assert json.loads(json.dumps(entry, allow_nan=False)) == entry


def test_a_case_that_raises_is_reported(monkeypatch):
    def fail(*_):
        raise RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376")

    monkeypatch.setattr(cases, "prepare", fail)
    entry = cases.run_case(MERGE, "reference", CPU)
    assert entry["status"] == "failed"
    assert entry["message"].startswith("RuntimeError: out of resource: shared memory")


@needs_cpu
def test_a_backend_that_does_not_run_here():
    entry = cases.run_case(MERGE, "hopper", CPU)
    assert (entry["status"], entry["message"]) == ("refused", "it has no merge_states in this version")


PROGRAM = """
import json, os, sys
for line in sys.stdin:
    job = json.loads(line)
    if job["case"] == "abort":
        print("LLVM ERROR: Cannot select: intrinsic", file=sys.stderr, flush=True)
        os.abort()
    status = "failed" if job["case"] == "error" else "ok"
    print(json.dumps({"status": status, "message": str(os.getpid())}), flush=True)
"""


def test_a_case_that_ends_its_process_does_not_end_the_report():
    with CaseProcess([sys.executable, "-c", PROGRAM]) as worker:
        first, same = worker.run({"case": 0}), worker.run({"case": 1})
        assert first == same
        ended = worker.run({"case": "abort"})
        assert ended["status"] == "failed"
        assert ended["message"].startswith("the process ended with signal 6: LLVM ERROR: Cannot select")
        # A CUDA error is permanent in a process, so a process ends after a failure.
        failed, another = worker.run({"case": "error"}), worker.run({"case": 2})
        assert another["status"] == "ok"
        assert len({first["message"], failed["message"], another["message"]}) == 3


def test_texts_name_no_folder_host_or_user(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(Path, "home", lambda: Path("/Users/alice of wonderland"))
    text = (
        "ptxas /tmp/tmpx1/kernel.ptx, line 3; error in '/home/alice/.triton/cache/AB/k.cubin' and "
        "/Users/alice of wonderland/x/code.py:12 and C:\\Users\\alice\\dev\\a.py and ~/notes/b.py on gpu-box, "
        "user Alice; (k/v) ratio 3/4"
    )
    cleaned = without_private(text)
    for private in ("alice", "home", "tmp", "Users", "wonderland", "gpu-box", "notes", ".triton"):
        assert private not in cleaned.lower()
    for kept in ("…/kernel.ptx, line 3", "…/k.cubin", "…/code.py:12", "…/a.py", "…/b.py", "(k/v) ratio 3/4"):
        assert kept in cleaned
    assert without_private("x" * 5000).startswith("…x")
    assert len(without_private("x" * 5000)) == 2000


@needs_cpu
@pytest.mark.skipif(machine.interpreting(), reason="runs the reference")
def test_the_command_writes_a_file(tmp_path, monkeypatch, capsys):
    few = [index for index, problem in enumerate(cases.CASES) if problem.operation in ("merge_states", "topk")]
    monkeypatch.setattr(hardware, "collect", functools.partial(hardware.collect, indices=few))
    file = tmp_path / "report.json"
    assert cli.main(["doctor", "--report", str(file)]) == 0
    assert capsys.readouterr().err.endswith(f"results are ok; written to {file}\n")
    text = file.read_text()
    report = json.loads(text)
    assert report["counts"] == {"ok": len(few)}
    assert (report["ceilings"], report["scaled_down"]) == (None, True)
    assert report["environment"]["torch"] == torch.__version__
    assert {entry["backend"] for entry in report["cases"]} == {"reference"}
    for private in (str(Path.home()), str(tmp_path), socket.gethostname()):
        assert private not in text


def test_a_report_takes_no_other_option(capsys):
    assert cli.main(["doctor", "--report", "--json"]) == cli.USER_ERROR
    assert "--report takes no other option" in capsys.readouterr().err


def test_cases_have_distinct_names():
    assert len({problem.name for problem in cases.CASES}) == len(cases.CASES)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, id=cases.CASES[index].name, marks=() if name in QUICK else pytest.mark.full)
        for index in hardware._different(CPU)
        for name in [cases.CASES[index].operation]
    ],
)
def test_cases_in_the_interpreter(index):
    entry = cases.run_case(cases.CASES[index].scaled_down(), "portable", CPU)
    assert (entry["status"], entry["message"]) == ("ok", None)


def test_a_report_that_cannot_be_written_is_refused(tmp_path, capsys):
    file = tmp_path / "missing" / "report.json"
    assert cli.main(["doctor", "--report", str(file)]) == cli.USER_ERROR
    expected = (
        f"flashlatte doctor: --report must be a file that can be written, got {file}: No such file or directory\n"
    )
    assert capsys.readouterr().err == expected
