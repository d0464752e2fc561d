"""``flashlatte serve`` on the command line: invalid arguments, and start and shutdown of the process."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest
from support.engine_models import generated_by_transformers, model
from support.letters import CHAT, Letters, save_letters

from flashlatte import cli, serve


@pytest.fixture
def checkpoint(serving, tmp_path):
    model("DeepseekV3").save_pretrained(tmp_path)
    save_letters(tmp_path, CHAT)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "-1"], "--port must be at least 0 and at most 65535, got -1"),
        (["--port", "70000"], "--port must be at least 0 and at most 65535, got 70000"),
        (["--max-queue", "-1"], "--max-queue must be at least 0, got -1"),
        (["--max-body-bytes", "0"], "--max-body-bytes must be at least 1, got 0"),
        (["--drain-seconds", "nan"], "--drain-seconds must be at least 0 and at most 3600, got nan"),
        (["--api-key", "ключ"], "--api-key must have printable ASCII characters only"),
        (["--port", "0", "--max-model-len", "513"], "--max-model-len must be from 2 to 512, which the model and the"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1, got 0"),
        (["--num-pages", "-3"], "--num-pages must be at least 1, got -3"),
        (["--page-size", "0"], "--page-size must be at least 1, got 0"),
        (["--swap-space", "-1"], "--swap-space must be at least 0, got -1"),
        (["--max-model-len", "1"], "--max-model-len must be at least 2, got 1"),
        (["--host", "256.0.0.1"], "--host and --port must be free to listen at, got 256.0.0.1 and 8000"),
    ],
)
def test_user_errors_print_one_line_and_exit_with_2(checkpoint, capsys, options, message):
    assert cli.main(["serve", str(checkpoint), *options]) == cli.USER_ERROR
    lines = capsys.readouterr().err.splitlines()
    # Options that no model accepts are refused before the weights are loaded.
    assert len(lines) == 1 or options[0] == "--port"
    assert lines[-1].startswith(f"flashlatte serve: {message}")


def test_a_port_that_is_in_use_is_found_before_the_weights_are_loaded(checkpoint, capsys):
    (checkpoint / "model.safetensors").unlink()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert cli.main(["serve", str(checkpoint), "--port", port]) == cli.USER_ERROR
    assert f"must be free to listen at, got 127.0.0.1 and {port}: Address already in use" in capsys.readouterr().err


def test_a_missing_package_is_named_with_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "flashlatte.serve.command", raising=False)
    monkeypatch.delattr(serve, "command", raising=False)
    assert cli.main(["serve", "nowhere"]) == cli.USER_ERROR
    assert capsys.readouterr().err == "flashlatte serve: the server needs uvicorn: pip install 'flashlatte[serve]'\n"


def ask(port: str, max_tokens: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=120)
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": max_tokens, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    return json.loads(connection.getresponse().read())["choices"][0]["text"]


def metrics(port: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=120)
    connection.request("GET", "/metrics")
    return connection.getresponse().read().decode()


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_drains_at_sigterm(checkpoint, ranks):
    """torchrun signals all ranks; the others must stay until rank 0 has drained."""
    launch = [sys.executable, "-m"]
    if ranks > 1:
        launch += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    options = ["--port", "0", "--served-model-name", "tiny", "--context-parallel", str(ranks)]
    command = [*launch, "flashlatte", "serve", str(checkpoint), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = next(filter(None, (re.search(r"at http://127.0.0.1:(\d+)/v1,", line) for line in process.stderr)))
        expected = Letters().decode(generated_by_transformers("DeepseekV3", Letters().encode("Hello"), 300))
        assert ask(found[1], 5) == expected[:5]
        texts: list[str] = []
        thread = threading.Thread(target=lambda: texts.append(ask(found[1], 300)))
        thread.start()
        while thread.is_alive() and "flashlatte_outputs_running 1" not in metrics(found[1]):
            thread.join(0.01)
        process.send_signal(signal.SIGTERM)
        errors = process.stderr.read()
        thread.join(120)
        # torchrun itself ends with 1 at a signal.
        assert process.wait(120) == (0 if ranks == 1 else 1), errors
    assert texts == [expected]
    assert "exited" not in errors
