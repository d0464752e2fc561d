"""Several processes call cases of the bench list in loops on one GPU: each call must give the bits of the first.

    PYTHONPATH=. python benchmarks/shared_gpu.py [--processes 6] [--seconds 30] [--case NAME ...] [--backend hopper]

The GPU switches between processes, so a kernel is stopped and goes on at any place, and its CTAs drift apart. Prints a
line for each process and case; exits with 1 if bits differed, a process ended, or one hung.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import torch

from flashlatte.bench import cases, workloads

# Of one case before a process goes on to the next, and between looks at the results.
SECONDS_EACH, CALLS_BETWEEN = 4.0, 12
# A process that has not ended by so long after its time hangs: it compiles first.
SECONDS_MORE = 120


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=6, help="that share the GPU (default 6)")
    parser.add_argument("--seconds", type=float, default=30.0, help="that each calls (default 30)")
    parser.add_argument("--case", action="append", help="a problem of the bench list (default: all)")
    parser.add_argument("--backend", default="hopper", help="default hopper; cases that it refuses are passed over")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        call_in_turn(arguments)
        return 0
    started = [
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--worker", str(number)], stdout=subprocess.PIPE)
        for number in range(arguments.processes)
    ]
    failed = sum(not ended_well(number, process, arguments.seconds) for number, process in enumerate(started))
    print(f"{failed} of {len(started)} processes failed")
    return 1 if failed else 0


def ended_well(number: int, process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        output, _ = process.communicate(timeout=seconds + SECONDS_MORE)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        print(f"process {number} hung")
    lines = [json.loads(line) for line in output.decode().splitlines()]
    for line in lines:
        print(f"process {number}: {line['case']}, {line['calls']} calls: {line['state']}")
    return process.returncode == 0 and all(line["state"] == "the same bits" for line in lines)


def call_in_turn(arguments: argparse.Namespace) -> None:
    """What a process does: case after case, each process beginning with another, until its time is up."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    problems = list({case.problem.name: case.problem for case in cases.CASES}.values())
    if arguments.case:
        problems = [problem for problem in problems if problem.name in arguments.case]
    first = arguments.worker * len(problems) // arguments.processes
    until = None
    while True:
        for problem in [*problems[first:], *problems[:first]]:
            workload = workloads.prepare(problem if device.type == "cuda" else problem.scaled_down(), device)
            try:
                expected = checked_call(workload, arguments.backend)
            except ValueError as error:
                if "cannot serve this call" in str(error):
                    continue
                raise
            workload.check(expected)
            if until is None:
                until = time.time() + arguments.seconds
            stop, calls, same = min(until, time.time() + SECONDS_EACH), 0, True
            while calls == 0 or time.time() < stop:
                for _ in range(CALLS_BETWEEN - 1):
                    workload.run(arguments.backend)
                results = checked_call(workload, arguments.backend)
                calls += CALLS_BETWEEN
                same = same and all(torch.equal(results[name], expected[name]) for name in expected)
            state = "the same bits" if same else "other bits"
            print(json.dumps({"case": problem.name, "calls": calls, "state": state}), flush=True)
            if time.time() >= until:
                return
        if until is None:
            sys.exit(f"{arguments.backend} serves none of these cases")


def checked_call(workload: workloads.Workload, backend: str) -> dict[str, torch.Tensor]:
    """Into outputs of which all that the call does not write is alike."""
    return {name: result.clone() for name, result in workload.run(backend, workload.poisoned_outputs()).items()}


if __name__ == "__main__":
    sys.exit(main())
