"""A decode step of vLLM's engine with one attention backend and another, in turns, on one GPU.

    python benchmarks/vllm_steps.py MODEL --backends CUSTOM,FLASHMLA,FLASH_ATTN_MLA --cases 1x4096,128x4096

MODEL is a directory with a config.json; weights are random numbers unless --load-format says otherwise. Each backend
has an engine in a process of its own, with an equal part of the GPU's memory. For each case, requests x tokens of
context, every engine prefills its requests, and then they take turns, A B C, C B A, and so on: a turn is --steps decode
steps. What is printed is the median step of the engine, scheduler and sampling included, and how long the GPU computes
in it. Each step must give each request a token; whether it is the right one is for tests.
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

MARK = "FLASHLATTE "  # of a worker's answers, among what vLLM prints
WARM_STEPS = 3
# Tokens of a step where nothing says otherwise: vLLM takes no fewer.
SMALLEST_BATCH = 2048
# Kernels that take less of a step than this are not in the line.
SMALLEST_SHARE = 0.02


class Worker:
    """An engine with one backend, in a process of its own that does what it is told."""

    def __init__(self, backend: str, arguments: list[str], memory: float) -> None:
        command = [sys.executable, __file__, *arguments, "--worker", backend, "--memory", str(memory)]
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
    """Be a worker: a request a line, an answer a line."""
    engine = Steps(arguments)
    print(MARK + json.dumps(engine.about()), flush=True)
    for line in sys.stdin:
        name, *values = json.loads(line)
        print(MARK + json.dumps(getattr(engine, name)(*values)), flush=True)


class Steps:
    """vLLM's engine, step by step."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from vllm import LLM

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
        import vllm

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        return {"device": device, "vllm": vllm.__version__, "torch": torch.__version__}

    def prefill(self, requests: int, context: int) -> int:
        """Replace the running requests by new ones, and step until each has its first token."""
        from vllm import SamplingParams

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
            raise SystemExit(f"a step gave {len(outputs)} of {len(self.running)} requests a token")

    def kernels(self, steps: int) -> dict[str, float]:
        """µs of a step that each kernel takes."""
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
    """Tokens of the longest request: the first ones are decoded in each step in which others are still prefilled."""
    batch = options.get("max_num_batched_tokens", SMALLEST_BATCH)
    measured = (arguments.rounds + 1) * arguments.steps + 16
    return max(context + -(-requests * context // max(batch - requests, 1)) for requests, context in cases) + measured


@dataclasses.dataclass
class Row:
    """What one backend took in one case."""

    worker: Worker
    us: list[float]
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)


def main(argv: list[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory with a config.json")
    parser.add_argument("--backends", default="CUSTOM,FLASHMLA,FLASH_ATTN_MLA", help="as vLLM calls them")
    parser.add_argument("--cases", default="1x4096,32x4096,128x4096", help="requests x tokens of context, by commas")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a turn (default 16)")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each backend (default 4)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--load-format", default="dummy", help="of the weights (default dummy: random numbers)")
    parser.add_argument("--options", default="{}", help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line for each backend and case")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU for all engines (default 0.9)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.worker:
        work(arguments)
        return

    backends = arguments.backends.split(",")
    # One after the other, as each engine looks at what memory is free.
    workers, about = [], {}
    for backend in backends:
        workers.append(Worker(backend, given, arguments.memory / len(backends)))
        about = workers[-1].answer()
    for requests, context in parsed(arguments.cases):
        rows = [Row(worker, []) for worker in workers]
        for row in rows:
            row.worker.ask("prefill", requests, context)
        for turn in range(arguments.rounds):
            for row in rows if turn % 2 == 0 else reversed(rows):
                row.us.append(row.worker.ask("time", arguments.steps))
        for row in rows:
            row.kernels = row.worker.ask("kernels", WARM_STEPS)
            report(row, f"b{requests}-{context}", about, arguments)


def report(row: Row, case: str, about: dict[str, str], arguments: argparse.Namespace) -> None:
    us, busy = statistics.median(row.us), sum(row.kernels.values())
    print(f"{case:>14} {row.worker.backend:<18}{us / 1e3:>9.3f} ms a step, of it the GPU {busy / 1e3:.3f}", flush=True)
    if arguments.json is None:
        return
    large = {name: round(spent, 1) for name, spent in row.kernels.items() if spent > SMALLEST_SHARE * busy}
    line = {"op": "vllm_step", "case": case, "backend": row.worker.backend.lower(), "us": round(us, 1)}
    line |= {
        "us_min": round(min(row.us), 1),
        "us_max": round(max(row.us), 1),
        "gpu_us": round(busy, 1),
        "kernels": large,
    }
    line |= {"dtype": arguments.dtype, "cache": arguments.kv_cache_dtype, "model": Path(arguments.model).name}
    line |= about | {"commit": os.environ.get("FLASHLATTE_COMMIT", ""), "date": time.strftime("%Y-%m-%d")}
    with arguments.json.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
