"""One of the processes: calls case after case until its time is up, and prints a JSON line for each.

A line with ``begins`` comes before a problem is called, its result after. ``{"ready": true}`` comes once this process's
share of the kernels is compiled; then it waits for a line of input.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from flashlatte.bench.problems import Problem
from flashlatte.bench.runner import described
from flashlatte.bench.shared.calls import Caller
from flashlatte.bench.shared.options import SharedGpuOptions
from flashlatte.bench.workloads import Workload, prepare
from flashlatte.runtime import dispatch

KEPT_BYTES = 2 * 2**30
REFUSED_IN_A_ROW = 1000


@dataclass(frozen=True)
class Worker:
    options: SharedGpuOptions
    process: int
    device: torch.device

    def run(self) -> None:
        for problem in self.options.compiled_first(self.process):
            self._compile(problem)
        say(ready=True)
        sys.stdin.readline()
        until, refused = time.time() + self.options.seconds, 0
        for problem in self.options.problems(self.process):
            if time.time() >= until:
                return
            refused = 0 if self._case(problem, until) else refused + 1
            if refused == REFUSED_IN_A_ROW:
                sys.exit(f"{self.options.backend} serves none of these cases")

    def _compile(self, problem: Problem) -> None:
        begins(problem)
        try:
            prepared = self._prepared(problem)
            if prepared is not None:
                workload, backend = prepared
                workload.run(backend)
        except Exception as error:
            if spoils_the_process(error):
                raise
            # Any other error recurs when the case is called, and is reported then.
        release()

    def _case(self, problem: Problem, until: float) -> bool:
        """Whether the backend serves it."""
        line: dict[str, Any] = begins(problem) | {"calls": 0}
        try:
            prepared = self._prepared(problem)
            if prepared is None:
                return False
            workload, line["backend"] = prepared
            streams = [torch.cuda.Stream() for _ in range(self.options.streams)] if self.device.type == "cuda" else []
            caller = Caller(workload, line["backend"], streams)
            caller.until(min(until, time.time() + self.options.each), self.options.ways)
            say(**line | {"calls": caller.calls, "faults": caller.faults})
        except Exception as error:
            if is_of_memory(error):
                say(**line | {"faults": [], "no_memory": True})
            else:
                say(**line | {"faults": [described(error)]})
            if spoils_the_process(error):
                raise
        caller = workload = prepared = None
        release()
        return True

    def _prepared(self, problem: Problem) -> tuple[Workload, str] | None:
        workload = prepare(problem if self.device.type == "cuda" else problem.scaled_down(), self.device)
        if self.options.backend is None:
            return workload, dispatch.select(workload.call)
        refusal = dispatch.refusal(workload.call, self.options.backend)
        return None if refusal is not None else (workload, self.options.backend)


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def begins(problem: Problem) -> dict[str, Any]:
    line = {"op": problem.operation, "case": problem.name, "problem": repr(problem)}
    say(begins=True, **line)
    return line


def spoils_the_process(error: Exception) -> bool:
    """Whether every later call on the GPU fails after this error."""
    return "CUDA" in str(error) and not is_of_memory(error)


def is_of_memory(error: Exception) -> bool:
    """Whether the GPU has too little memory for this case, which Triton and CUDA graphs report only in the message."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def release() -> None:
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()


def main() -> None:
    options, process = json.loads(sys.argv[1])
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    Worker(SharedGpuOptions.of(options), process, device).run()


if __name__ == "__main__":
    main()
