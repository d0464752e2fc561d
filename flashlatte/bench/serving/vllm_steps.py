"""A decode step of vLLM's engine with different attention backends, timed alternately on one GPU.

    flashlatte bench vllm-steps MODEL --backends CUSTOM,FLASHMLA,FLASH_ATTN_MLA --cases 1x4096,128x4096

MODEL is a directory with a config.json; weights are random numbers unless --load-format says otherwise. Each backend
has an engine in its own process, with an equal share of the GPU's memory. For each case, requests x tokens of context,
every engine prefills its requests; then they alternate, A B C, C B A, and so on, with --steps decode steps each. Prints
the median step of the engine, scheduler and sampling included, and the GPU time in it. Each step must return a token
for each request; tests check the tokens themselves.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from flashlatte.bench import environment
from flashlatte.bench.alternate import add_json_option
from flashlatte.bench.results import append_line

MARK = "FLASHLATTE "  # marks answers among vLLM's output
WARM_STEPS = 3
# vLLM's smallest default of max_num_batched_tokens.
MIN_BATCHED_TOKENS = 2048
# Kernels with a smaller share of a step are not in the line.
MIN_SHARE = 0.02


class EngineProcess:
    """An engine with one backend in its own process, which answers requests."""

    def __init__(self, backend: str, settings: dict[str, Any]) -> None:
        command = [
            sys.executable,
            "-m",
            "flashlatte.bench.serving.vllm_steps",
            json.dumps(settings | {"worker": backend}),
        ]
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        self.backend = backend
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
            print(line, end="", file=sys.stderr)
        raise SystemExit(f"the engine with {self.backend} ended with {self.process.wait()}")

    def ask(self, *request: Any) -> Any:
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.answer()


def work(arguments: argparse.Namespace) -> None:
    """The loop of an engine's process: a request per line, an answer per line."""
    engine = EngineSteps(arguments)
    print(MARK + json.dumps(engine.about()), flush=True)
    for line in sys.stdin:
        name, *values = json.loads(line)
        print(MARK + json.dumps(getattr(engine, name)(*values)), flush=True)


class EngineSteps:
    """vLLM's engine, step by step."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        cases = parsed(arguments.cases)
        options: dict[str, Any] = json.loads(arguments.options)
        llm = LLM(
            model=arguments.model,
            load_format=arguments.load_format,
            dtype=arguments.dtype,
            kv_cache_dtype=arguments.kv_cache_dtype,
            attention_config={"backend": arguments.worker},
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_seqs=max(requests for requests, _ in cases),
            max_model_len=longest(cases, arguments, options),
            gpu_memory_utilization=arguments.memory,
            **options,
        )
        self.engine: Any = llm.llm_engine
        config = json.loads((Path(arguments.model) / "config.json").read_text(encoding="utf-8"))
        self.vocabulary = config["vocab_size"]
        self.running: list[str] = []

    def about(self) -> dict[str, str]:
        import vllm  # pyright: ignore[reportMissingImports]

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        return {"device": device, "vllm": vllm.__version__, "torch": torch.__version__}

    def prefill(self, requests: int, context: int) -> int:
        """Replace the running requests by new ones, and step until each has its first token."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        self.engine.abort_request(self.running)
        draw = random.Random(0)
        sampling = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=False)
        self.running = [f"{time.monotonic_ns()}-{number}" for number in range(requests)]
        for name in self.running:
            tokens = [draw.randrange(self.vocabulary) for _ in range(context)]
            self.engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
        begun: set[str] = set()
        while len(begun) < requests:
            begun.update(output.request_id for output in self.engine.step() if output.outputs[0].token_ids)
        self.time(WARM_STEPS)
        return requests

    def time(self, steps: int) -> float:
        """µs of a step."""
        synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize()
        return (time.perf_counter() - began) / steps * 1e6

    def step(self) -> None:
        outputs = self.engine.step()
        if len(outputs) != len(self.running):
            raise SystemExit(f"a step returned tokens for {len(outputs)} of {len(self.running)} requests")

    def kernels(self, steps: int) -> dict[str, float]:
        """µs of each kernel in a step."""
        if not torch.cuda.is_available():
            return {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.time(steps)
        spent = {event.key: event.self_device_time_total / steps for event in profile.key_averages()}
        return {name: us for name, us in spent.items() if us}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def parsed(cases: str) -> list[tuple[int, int]]:
    return [(int(requests), int(context)) for requests, context in (case.split("x") for case in cases.split(","))]


def longest(cases: list[tuple[int, int]], arguments: argparse.Namespace, options: dict[str, Any]) -> int:
    """Tokens of the longest request: the first requests decode in each step in which others are still prefilled."""
    batch = options.get("max_num_batched_tokens", MIN_BATCHED_TOKENS)
    measured = (arguments.rounds + 1) * arguments.steps + 16
    return max(context + -(-requests * context // max(batch - requests, 1)) for requests, context in cases) + measured


@dataclasses.dataclass
class BackendTimes:
    """Times of one backend in one case."""

    engine: EngineProcess
    us: list[float]
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="a directory with a config.json")
    add("--backends", default="CUSTOM,FLASHMLA,FLASH_ATTN_MLA", help="vLLM's names, separated by commas")
    add("--cases", default="1x4096,32x4096,128x4096", help="requests x tokens of context, separated by commas")
    add("--steps", type=int, default=16, help="decode steps of a measurement (default 16)")
    add("--rounds", type=int, default=4, help="measurements of each backend (default 4)")
    add("--dtype", default="bfloat16")
    add("--kv-cache-dtype", default="auto")
    add("--load-format", default="dummy", help="of the weights (default dummy: random numbers)")
    add("--options", default="{}", help="further arguments of vllm.LLM, as JSON")
    add("--memory", type=float, default=0.9, help="share of the GPU for all engines (default 0.9)")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    backends = options.backends.split(",")
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "forwarded")}
    settings["memory"] = options.memory / len(backends)
    # One after the other, as each engine measures the free memory.
    engines, about = [], {}
    for backend in backends:
        engines.append(EngineProcess(backend, settings))
        about = engines[-1].answer()
    for requests, context in parsed(options.cases):
        rows = [BackendTimes(engine, []) for engine in engines]
        for row in rows:
            row.engine.ask("prefill", requests, context)
        for number in range(options.rounds):
            for row in rows if number % 2 == 0 else reversed(rows):
                row.us.append(row.engine.ask("time", options.steps))
        for row in rows:
            row.kernels = row.engine.ask("kernels", WARM_STEPS)
            report(row, f"b{requests}-{context}", about, options)
    return 0


def report(row: BackendTimes, case: str, about: dict[str, str], arguments: argparse.Namespace) -> None:
    us, busy = statistics.median(row.us), sum(row.kernels.values())
    print(f"{case:>14} {row.engine.backend:<18}{us / 1e3:>9.3f} ms a step, GPU {busy / 1e3:.3f}", flush=True)
    large = {name: round(spent, 1) for name, spent in row.kernels.items() if spent > MIN_SHARE * busy}
    line = {"op": "vllm_step", "case": case, "backend": row.engine.backend.lower(), "us": round(us, 1)}
    line |= {
        "us_min": round(min(row.us), 1),
        "us_max": round(max(row.us), 1),
        "gpu_us": round(busy, 1),
        "kernels": large,
    }
    line |= {"dtype": arguments.dtype, "cache": arguments.kv_cache_dtype, "model": Path(arguments.model).name}
    line |= about | {"commit": environment.commit(), "date": time.strftime("%Y-%m-%d")}
    append_line(arguments.json, line)


if __name__ == "__main__":
    work(argparse.Namespace(**json.loads(sys.argv[1])))
