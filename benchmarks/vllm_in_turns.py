"""vLLM's throughput without FlashLatte and with it, in turns: vLLM's own benchmark, each time in a process of its own.

    python benchmarks/vllm_in_turns.py MODEL --lengths 4096,32768 -- --tensor-parallel-size 8

What follows ``--`` goes to ``vllm bench throughput`` as it is. Each length runs A B B A, as often as ``--rounds`` says:
a GPU that is warm from the first run is slower in the second. Seconds are of the whole batch, prefill and decode.
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

WITHOUT, WITH = "vLLM's own", "FlashLatte"
OPTIONS = {WITHOUT: [], WITH: ["--attention-backend", "CUSTOM"]}


def seconds(model: str, length: int, arguments: argparse.Namespace, who: str, further: list[str]) -> float:
    """How long vLLM takes for all prompts of one length."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [arguments.vllm, "bench", "throughput", "--model", model, "--dataset-name", "random"]
        command += ["--random-input-len", str(length), "--random-output-len", str(arguments.output)]
        command += ["--num-prompts", str(arguments.prompts), "--output-json", str(result), *OPTIONS[who], *further]
        # The variable would take vLLM's own choice over in both.
        environment = {name: value for name, value in os.environ.items() if name != "FLASHLATTE_VLLM"}
        done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
        if done.returncode or not result.exists():
            raise SystemExit(f"vLLM ended with {done.returncode}: {' '.join(command)}")
        measured = json.loads(result.read_text(encoding="utf-8"))
        if measured["num_requests"] != arguments.prompts:
            raise SystemExit(f"vLLM ran {measured['num_requests']} of {arguments.prompts} prompts")
        return measured["elapsed_time"]


def main(argv: list[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else argv
    ours, further = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as vLLM takes it")
    parser.add_argument("--lengths", default="4096", help="tokens of a prompt, by commas (default 4096)")
    parser.add_argument("--output", type=int, default=256, help="tokens to generate for each (default 256)")
    parser.add_argument("--prompts", type=int, default=64, help="prompts (default 64)")
    parser.add_argument("--rounds", type=int, default=1, help="of A B B A (default 1)")
    parser.add_argument("--vllm", default="vllm", help="the command (default vllm)")
    arguments = parser.parse_args(ours)

    print(f"{'prompt':>8}{'prompts':>9}{'new tokens/s':>27}{'seconds':>21}{'times as fast':>15}")
    print(f"{'':17}{WITHOUT:>14}{WITH:>13}{WITHOUT:>11}{WITH:>10}")
    for length in map(int, arguments.lengths.split(",")):
        times: dict[str, list[float]] = {WITHOUT: [], WITH: []}
        for who in (WITHOUT, WITH, WITH, WITHOUT) * arguments.rounds:
            times[who].append(seconds(arguments.model, length, arguments, who, further))
        before, after = (statistics.median(times[who]) for who in (WITHOUT, WITH))
        made = arguments.prompts * arguments.output
        rates = f"{made / before:>14.0f}{made / after:>13.0f}"
        print(
            f"{length:>8}{arguments.prompts:>9}{rates}{before:>11.2f}{after:>10.2f}{before / after:>15.2f}", flush=True
        )


if __name__ == "__main__":
    main()
