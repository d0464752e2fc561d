"""The benchmark command of the guide, as vLLM parses it."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

from flashlatte import bench
from flashlatte.bench.serving import vllm_throughput

ROOT = Path(__file__).resolve().parents[3]
COMMAND = "flashlatte bench "


def test_the_guides_benchmark_command(monkeypatch):
    from vllm.benchmarks.throughput import add_cli_args, validate_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    runs = []

    def run(command, **_):
        assert command[:3] == ["vllm", "bench", "throughput"]
        arguments = parser.parse_args(command[3:])
        validate_args(arguments)
        runs.append(arguments)
        result = {"num_requests": arguments.num_prompts, "elapsed_time": 1.0}
        Path(arguments.output_json).write_text(json.dumps(result))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(vllm_throughput.subprocess, "run", run)
    lines = (ROOT / "docs" / "guide" / "vllm.md").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{COMMAND}vllm-throughput "))
    name, *arguments = shlex.split(line.removeprefix(COMMAND))
    bench.run_named(name, arguments)

    assert [str(run.attention_backend) for run in runs] == ["None", "CUSTOM", "CUSTOM", "None"] * 2
    assert [run.random_input_len for run in runs] == [4096] * 4 + [32768] * 4
    for one in runs:
        assert (one.dataset_name, one.random_output_len, one.num_prompts, one.max_num_seqs) == ("random", 256, 64, 64)
        # vLLM prefers the other option if both are given.
        assert (one.input_len, one.output_len) == (None, None)
