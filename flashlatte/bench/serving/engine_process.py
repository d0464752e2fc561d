"""A serving engine in a separate process, which runs the methods that requests name, and returns their results."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from flashlatte.bench.timing import kernel_times

MARK = "FLASHLATTE "  # marks answers among an engine's output


class EngineEnded(Exception):
    """An engine's process ended before it answered."""


class EngineProcess:
    """The process of an engine. It starts immediately and is ready after its first answer.

    Args:
        backend: the engine's name in messages and results; the engine receives it as ``worker``.
        module: the module that runs in the process and calls ``answer_requests``.
        settings: the engine's arguments.
        variables: environment variables of the process, in addition to those of this one.
    """

    def __init__(
        self,
        backend: str,
        module: str,
        settings: Mapping[str, Any],
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        command = [sys.executable, "-m", module, json.dumps({**settings, "worker": backend})]
        self.backend = backend
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | dict(variables)
        )

    def answer(self) -> Any:
        """The answer to the oldest request.

        Raises:
            EngineEnded: the process ended.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
            print(line, end="", file=sys.stderr)
        raise EngineEnded(f"the engine with {self.backend} ended with {self.process.wait()}")

    def ask(self, *request: Any) -> Any:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ended; there is no answer either
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def answer_requests(make_engine: Callable[[argparse.Namespace], Any]) -> None:
    """The loop of an engine's process: a request per line, an answer per line. The first answer is ``about()``."""
    engine = make_engine(argparse.Namespace(**json.loads(sys.argv[1])))
    print(MARK + json.dumps(engine.about()), flush=True)
    for line in sys.stdin:
        name, *values = json.loads(line)
        print(MARK + json.dumps(getattr(engine, name)(*values)), flush=True)


class SteppedEngine:
    """The object in an engine's process; ``time`` makes some steps, ``prefill`` one of some tokens."""

    def kernels(self, what: str, number: int) -> dict[str, float]:
        """µs of each kernel in a step (``what`` "time", of ``number`` steps), or in a prefill of ``number`` tokens."""
        spent = kernel_times(lambda: getattr(self, what)(number))
        return {name: us / (number if what == "time" else 1) for name, us in spent.items()}
