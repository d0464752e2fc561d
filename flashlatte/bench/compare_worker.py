"""A process of ``flashlatte bench compare``: a request per line on stdin, an answer per line on stdout, both JSON.

``compare`` passes the text of this file to the interpreter and puts a checkout on PYTHONPATH, so that both checkouts
are timed by the same version of this file.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import torch

from flashlatte.bench import cases, environment, runner, workloads


def serve() -> None:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    known = {f"{case.problem.name}/{case.method}": case for case in cases.CASES}
    # Other output must not come between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    nothing = (None, None)
    drawn: tuple[Any, Any] = nothing
    current: tuple[Any, str, Any] | None = None
    for line in sys.stdin:
        verb, *words = json.loads(line)
        answer: Any = None
        if verb == "list":
            answer = list(known)
        elif verb == "about":
            answer = dataclasses.asdict(environment.describe(device))
        elif verb == "release":
            current, drawn = None, nothing
            runner._release()
        elif verb == "prepare":
            name, backend = words
            case = known[name]
            problem = case.problem if device.type == "cuda" else case.problem.scaled_down()
            try:
                if drawn[0] != problem:
                    current, drawn = None, nothing
                    runner._release()
                    drawn = problem, workloads.prepare(problem, device)
                outcome = runner._outcome(case, backend, drawn[1])
                answer = outcome["status"]
                if answer not in ("ok", "refused"):
                    answer += f" {outcome['message']}"
            except Exception as error:
                answer = f"failed: {error}".splitlines()[0]
            current = case, backend, drawn[1]
        else:
            assert current is not None
            answer = runner._microseconds(*current)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
