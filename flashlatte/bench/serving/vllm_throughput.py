"""vLLM's throughput with its own backends and with FlashLatte, alternately: vLLM's benchmark in a process per run.

    flashlatte bench vllm-throughput MODEL --lengths 4096,32768 -- --tensor-parallel-size 8

Arguments after ``--`` are passed to ``vllm bench throughput``. Each length runs A B B A, ``--rounds`` times: a GPU that
is warm from the first run is slower in the second. Seconds are for the whole batch, prefill and decode.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FORWARDS = True
WITHOUT, WITH = "vLLM's own", "FlashLatte"
OPTIONS = {WITHOUT: [], WITH: ["--attention-backend", "CUSTOM"]}


def seconds(length: int, arguments: argparse.Namespace, backend: str) -> float:
    """Seconds of vLLM for all prompts of one length."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [arguments.vllm, "bench", "throughput", "--model", arguments.model, "--dataset-name", "random"]
        command += ["--random-input-len", str(length), "--random-output-len", str(arguments.output)]
        command += ["--num-prompts", str(arguments.prompts), "--output-json", str(result)]
        command += [*OPTIONS[backend], *arguments.forwarded]
        # The variable would replace vLLM's own backend in both.
        environment = {name: value for name, value in os.environ.items() if name != "FLASHLATTE_VLLM"}
        done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
        if done.returncode or not result.exists():
            raise SystemExit(f"vLLM ended with {done.returncode}: {' '.join(command)}")
        measured = json.loads(result.read_text(encoding="utf-8"))
        if measured["num_requests"] != arguments.prompts:
            raise SystemExit(f"vLLM ran {measured['num_requests']} of {arguments.prompts} prompts")
        return measured["elapsed_time"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="vLLM's --model")
    add("--lengths", default="4096", help="tokens of a prompt, separated by commas (default 4096)")
    add("--output", type=int, default=256, help="tokens to generate for each prompt (default 256)")
    add("--prompts", type=int, default=64, help="number of prompts (default 64)")
    add("--rounds", type=int, default=1, help="repetitions of A B B A (default 1)")
    add("--vllm", default="vllm", help="command that starts vLLM (default vllm)")


def run(arguments: argparse.Namespace) -> int:
    print(f"{'prompt':>8}{'prompts':>9}{'new tokens/s':>27}{'seconds':>21}{'times as fast':>15}")
    print(f"{'':17}{WITHOUT:>14}{WITH:>13}{WITHOUT:>11}{WITH:>10}")
    for length in map(int, arguments.lengths.split(",")):
        times: dict[str, list[float]] = {WITHOUT: [], WITH: []}
        for backend in (WITHOUT, WITH, WITH, WITHOUT) * arguments.rounds:
            times[backend].append(seconds(length, arguments, backend))
        before, after = (statistics.median(times[backend]) for backend in (WITHOUT, WITH))
        generated = arguments.prompts * arguments.output
        rates = f"{generated / before:>14.0f}{generated / after:>13.0f}"
        rates += f"{before:>11.2f}{after:>10.2f}{before / after:>15.2f}"
        print(f"{length:>8}{arguments.prompts:>9}{rates}", flush=True)
    return 0
