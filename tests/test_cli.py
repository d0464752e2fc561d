import json
import subprocess
import sys

import pytest
import torch

from flashlatte import cli, dispatch, doctor

needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU does")


@needs_cpu
def test_doctor_as_json_names_every_operation_and_why(capsys):
    assert cli.main(["doctor", "--json", "--dtype", "fp32"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["device"]["type"] == "cpu"
    assert facts["versions"]["torch"] == torch.__version__
    assert {entry["operation"] for entry in facts["operations"]} == set(dispatch.operations())
    assert all(entry["runs"] == "reference" for entry in facts["operations"])
    assert all("hopper" in entry["refusals"] for entry in facts["operations"])


def test_doctor_tells_what_select_would_do():
    for call, entry in zip(
        doctor.typical_calls(torch.device("cpu"), torch.bfloat16), doctor.examine()["operations"], strict=True
    ):
        if not torch.cuda.is_available():
            assert entry["runs"] == dispatch.select(call)


def test_doctor_for_a_terminal(capsys):
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "dense_decode over bf16" in printed
    assert "not hopper: it " in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--case", "nonsense"], "flashlatte bench: no case named 'nonsense'"),
        (["demo", "--prompt", "no/such/file"], "flashlatte demo: "),
        (["demo", "--new-tokens", "0"], "flashlatte demo: "),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert cli.main(arguments) == cli.USER_ERROR
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_unknown_commands_exit_with_2():
    with pytest.raises(SystemExit, match="2"):
        cli.main(["brew"])


def test_a_reader_that_has_enough_is_no_error():
    command = f"{sys.executable} -m flashlatte.cli doctor --json | true"
    finished = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert finished.returncode == 0
    assert "Broken pipe" not in finished.stderr
