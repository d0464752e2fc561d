"""A process that runs the cases of a report one by one, so that a crash of one case does not end the report."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO, Any

import torch

from flashlatte.bench import timing
from flashlatte.doctor.cases import CASES, run_case

# Seconds that a job may take, including the compilation of a kernel.
CASE_SECONDS = 600
STDERR_CHARACTERS = 2000
CEILINGS = "ceilings"
COMMAND = (sys.executable, "-m", "flashlatte.doctor.worker")


class CaseProcess:
    """The process. It starts with the first job, and restarts after a failed one, because CUDA errors are sticky.

    Args:
        command: the process, which answers as ``main`` does.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._stderr: IO[bytes] | None = None

    def __enter__(self) -> CaseProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer to a job; ``{"status": "failed", "message": ...}`` if the process ended or took too long."""
        process = self._process or self._start()
        timer = threading.Timer(CASE_SECONDS, process.kill)
        timer.start()
        try:
            line = self._exchange(process, json.dumps(job))
        finally:
            timer.cancel()
        answer = json.loads(line) if line else {"status": "failed", "message": self._last_words(process)}
        if answer["status"] == "failed":
            self._stop()
        return answer

    @staticmethod
    def _exchange(process: subprocess.Popen[str], line: str) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return ""
        return process.stdout.readline()

    def _start(self) -> subprocess.Popen[str]:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._stderr}
        self._process = subprocess.Popen(self._command, text=True, **pipes)
        return self._process

    def _last_words(self, process: subprocess.Popen[str]) -> str:
        """Why the process ended: its exit code, and the end of what it printed to stderr."""
        code = process.wait()
        reason = f"the process ended with signal {-code}" if code < 0 else f"the process ended with code {code}"
        assert self._stderr is not None
        self._stderr.seek(0)
        printed = self._stderr.read().decode(errors="replace").strip()
        return f"{reason}: {printed[-STDERR_CHARACTERS:]}" if printed else reason

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout, self._stderr):
                if stream is not None:
                    stream.close()
        self._process = self._stderr = None


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job: ``{"case": index of CASES, "backend": name}``, or ``{"case": "ceilings"}`` for the GPU's rates."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if job["case"] != CEILINGS:
        problem = CASES[job["case"]]
        return run_case(problem if device.type == "cuda" else problem.scaled_down(), job["backend"], device)
    try:
        return {"status": "ok", **dataclasses.asdict(timing.measure_ceilings(device))}
    except Exception as error:  # too little memory, for example
        return {"status": "failed", "message": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answer each line of stdin with a line on stdout. All other output to stdout is redirected to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
