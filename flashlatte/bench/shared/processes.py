"""Starts the processes, reads their output, and reports those that die or hang."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from tempfile import TemporaryFile
from typing import IO, Any

from flashlatte.bench.shared.options import SharedGpuOptions

Line = dict[str, Any]
# Time to compile before the measurement, and beyond its end, since a process finishes its case.
SECONDS_TO_COMPILE, SECONDS_MORE = 300, 120


@dataclass
class Process:
    """A worker and its output.

    Attributes:
        began: the line of the last case that it began.
        finished: whether that case has a result.
        ready: set once its kernels are compiled, or it ended before.
    """

    number: int
    popen: subprocess.Popen[str]
    errors: IO[str]
    lines: list[Line] = field(default_factory=list)
    began: Line | None = None
    finished: bool = True
    ready: threading.Event = field(default_factory=threading.Event)

    def read(self, report: Callable[[Line], None]) -> None:
        assert self.popen.stdout is not None
        for text in self.popen.stdout:
            if not text.startswith("{"):
                continue
            line = json.loads(text)
            if "ready" in line:
                self.finished = True
                self.ready.set()
            elif "begins" in line:
                self.began, self.finished = line, False
            else:
                self.finished = True
                self.keep(line, report)
        self.ready.set()

    def keep(self, line: Line, report: Callable[[Line], None]) -> None:
        line = {"process": self.number, **line}
        self.lines.append(line)
        report(line)

    def report_end(self, how: str, report: Callable[[Line], None]) -> None:
        """A result for the case that the process was in, unless the process gave one of its own."""
        if self.finished and any(line["faults"] for line in self.lines[-1:]):
            return
        case = self.began or {"op": None, "case": "none", "problem": None}
        line = {name: case[name] for name in ("op", "case", "problem")} | {"calls": 0}
        self.keep(line | {"faults": [f"the process {how}{self._last_error()}"]}, report)

    def _last_error(self) -> str:
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        errors = [line for line in lines if "Error" in line or "error" in line] or lines
        return f": {errors[-1]}" if errors else ""


def run(options: SharedGpuOptions, report: Callable[[Line], None]) -> list[Line]:
    """The lines of all processes; each is also passed to ``report`` when it arrives, in any order of processes."""
    with contextlib.ExitStack() as stack:
        for _ in range(options.load):
            stack.enter_context(_started("load"))
        processes, readers = [], []
        for number in range(options.processes):
            errors = stack.enter_context(TemporaryFile("w+", encoding="utf-8", errors="replace"))
            popen = stack.enter_context(_started("worker", json.dumps([asdict(options), number]), stderr=errors))
            processes.append(Process(number, popen, errors))
            readers.append(threading.Thread(target=processes[-1].read, args=(report,), daemon=True))
            readers[-1].start()
        until = time.time() + SECONDS_TO_COMPILE
        for process in processes:
            process.ready.wait(max(until - time.time(), 0))
        for process in processes:
            _let_begin(process.popen)
        until = time.time() + options.seconds + SECONDS_MORE
        for process, reader in zip(processes, readers, strict=True):
            hung = _hung(process.popen, until)
            reader.join()
            if hung:
                process.report_end("hung", report)
            elif process.popen.returncode:
                process.report_end(f"ended with {process.popen.returncode}", report)
    return [line for process in processes for line in process.lines]


def command_of(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"flashlatte.bench.shared.{module}", *arguments]


@contextlib.contextmanager
def _started(module: str, *arguments: str, stderr: IO[str] | None = None) -> Iterator[subprocess.Popen[str]]:
    command = command_of(module, *arguments)
    popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield popen
    finally:
        popen.kill()
        popen.wait()
        for pipe in (popen.stdin, popen.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _let_begin(popen: subprocess.Popen[str]) -> None:
    assert popen.stdin is not None
    with contextlib.suppress(OSError):  # of one that has died
        popen.stdin.write("begin\n")
        popen.stdin.flush()


def _hung(popen: subprocess.Popen[str], until: float) -> bool:
    try:
        popen.wait(max(until - time.time(), 0.1))
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
        return True
    return False
