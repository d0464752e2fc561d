"""Decode steps and prefills of vLLM's engine with different attention backends, timed alternately on one GPU.

    flashlatte bench vllm-steps MODEL --backends CUSTOM,FLASHMLA,FLASH_ATTN_MLA --cases 1x4096,128x4096 --prefill 8192

MODEL is a directory with a config.json, or v3: layers of DeepSeek-V3's sizes, the dense ones. Weights are random
numbers unless --load-format says otherwise. Each backend has an engine in its own process, with an equal share of the
GPU's memory. For each case, requests x tokens of context, every engine prefills its requests, or with --random-contexts
finds random keys in its cache. Then they alternate, A B C, C B A, and so on, with --steps decode steps each.

Prints the median step of the engine, scheduler and sampling included, the GPU time in it, and of that the time of
attention kernels. The first tokens of the requests and their log-probabilities are compared with the first backend's:
how many requests have the same tokens, and the largest difference of a log-probability before a token differs. JSON
lines have this "agreement" with each other backend.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flashlatte.bench import environment
from flashlatte.bench.alternate import add_json_option
from flashlatte.bench.results import append_line
from flashlatte.bench.serving.vllm_engine import (
    WARM_STEPS,
    EngineEnded,
    EngineProcess,
    lengths_of,
    parsed,
)
from flashlatte.bench.serving.vllm_model import write_v3
from flashlatte.bench.serving.vllm_requests import PREFILLED

Tokens = list[list[list[float]]]  # for each request its tokens, each with its log-probability
# Kernels with a smaller share of a step are not in the line.
MIN_SHARE = 0.01
# Of CUTLASS's kernels, whose names have thousands of letters.
NAME_LETTERS = 100
# Of attention itself, without projections and without writes of the cache.
ATTENTION = re.compile(
    r"dense_decode|sparse_decode|_prefill|combine|merge_|mla_metadata|flash_fwd|FlashAttn|prepare_varlen"
    r"|_fwd_(grouped_)?kernel_stage"
)


@dataclasses.dataclass(frozen=True)
class StepCase:
    """What is asked of each engine: the name and arguments of a method of ``EngineSteps``."""

    name: str
    compare: tuple[Any, ...]
    prepare: tuple[Any, ...]
    measure: tuple[Any, ...]
    profile: tuple[Any, ...]


@dataclasses.dataclass
class BackendTimes:
    """What one backend's engine took in one case, in µs, and the tokens that it generated."""

    engine: EngineProcess
    us: list[float] = dataclasses.field(default_factory=list)
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    tokens: Tokens = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.us)

    @property
    def busy(self) -> float:
        return sum(self.kernels.values())

    @property
    def attention(self) -> float:
        return sum(us for name, us in self.kernels.items() if ATTENTION.search(name))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="a directory with a config.json, or v3")
    add("--layers", type=int, default=3, help="of the model v3 (default 3)")
    add("--backends", default="CUSTOM,FLASHMLA,FLASH_ATTN_MLA", help="vLLM's names, separated by commas")
    add("--cases", default="1x4096,32x4096,128x4096", help="requests x tokens of context, separated by commas")
    add("--prefill", default="", help="tokens of prompts whose prefill is timed, separated by commas")
    add("--random-contexts", action="store_true", help="do not prefill contexts: caches have random keys")
    add("--steps", type=int, default=16, help="decode steps of a measurement (default 16)")
    add("--rounds", type=int, default=4, help="measurements of each backend (default 4)")
    add("--dtype", default="bfloat16")
    add("--kv-cache-dtype", default="auto")
    add("--load-format", default="random", help="of the weights (default random: numbers that keep activations' scale)")
    add("--options", default="{}", help="further arguments of vllm.LLM, as JSON")
    add("--memory", type=float, default=0.9, help="share of the GPU for all engines (default 0.9)")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "forwarded")}
    backends = options.backends.split(",")
    settings["memory"] = options.memory / len(backends)
    with contextlib.ExitStack() as stack:
        if options.model == "v3":
            settings["model"] = stack.enter_context(tempfile.TemporaryDirectory())
            write_v3(Path(settings["model"]), options.layers)

        def started(backend: str) -> BackendTimes:
            engine = EngineProcess(backend, settings)
            stack.callback(engine.end)
            return BackendTimes(engine)

        starting: Iterable[BackendTimes] = map(started, backends)
        if "kv_cache_memory_bytes" in json.loads(options.options):
            starting = list(starting)  # all together; otherwise one after the other, as each measures the free memory
        about: dict[str, dict[str, Any]] = {}
        rows = surviving(starting, lambda row: about.update({row.engine.backend: row.engine.answer()}))
        ratios: dict[str, list[float]] = {backend: [] for backend in about}
        for case in cases_of(options):
            rows = measured(case, [BackendTimes(row.engine) for row in rows], options.rounds)
            for row in rows:
                report(case, row, rows, about[row.engine.backend], options)
                ratios[row.engine.backend].append(row.median / rows[0].median)
    for backend, values in ratios.items():
        if values:
            mean = statistics.geometric_mean(values)
            print(f"{backend}: {mean:.3f} times as long as {backends[0]} (geometric mean of {len(values)} cases)")
    return 0 if len(rows) == len(backends) else 1


def cases_of(options: argparse.Namespace) -> list[StepCase]:
    decode = [
        StepCase(
            f"b{requests}-{context}",
            ("tokens", requests, context),
            ("start", requests, context),
            ("time", options.steps),
            ("kernels", "time", WARM_STEPS),
        )
        for requests, context in parsed(options.cases)
    ]
    prefill = [
        StepCase(
            f"prefill-{length}",
            ("tokens", 1, length, PREFILLED),
            ("prefill", length),
            ("prefill", length),
            ("kernels", "prefill", length),
        )
        for length in lengths_of(options.prefill)
    ]
    return decode + prefill


def surviving(rows: Iterable[BackendTimes], action: Callable[[BackendTimes], None]) -> list[BackendTimes]:
    """The rows, without those whose engine ended during the action."""
    left = []
    for row in rows:
        try:
            action(row)
        except EngineEnded as error:
            print(error, file=sys.stderr, flush=True)
        else:
            left.append(row)
    return left


def measured(case: StepCase, rows: list[BackendTimes], rounds: int) -> list[BackendTimes]:
    """Rows with times, kernels and tokens, in the order of ``rows`` and without those whose engine ended."""

    def compare(row: BackendTimes) -> None:
        row.tokens = row.engine.ask(*case.compare)
        row.engine.ask(*case.prepare)

    def time_once(row: BackendTimes) -> None:
        row.us.append(row.engine.ask(*case.measure))

    def profile(row: BackendTimes) -> None:
        row.kernels = row.engine.ask(*case.profile)

    left = surviving(rows, compare)
    for _ in range(rounds):
        left = surviving(left, time_once)[::-1]
    left = surviving(left, profile)
    return [row for row in rows if row in left]


def agreement(tokens: Tokens, others: Tokens) -> tuple[int, float]:
    """The requests with equal tokens, and the largest difference of a log-probability before a token differs."""
    equal, largest = 0, 0.0
    for ours, theirs in zip(tokens, others, strict=True):
        alike = list(zip(ours, theirs, strict=True))
        while alike and any(one[0] != other[0] for one, other in alike):
            alike.pop()
        equal += len(alike) == len(ours)
        largest = max([largest, *(abs(one[1] - other[1]) for one, other in alike)])
    return equal, largest


def report(
    case: StepCase, row: BackendTimes, rows: list[BackendTimes], about: dict[str, Any], arguments: argparse.Namespace
) -> None:
    first = rows[0]
    equal, largest = agreement(row.tokens, first.tokens)
    print(
        f"{case.name:>14} {row.engine.backend:<18}{row.median / 1e3:>9.3f} ms, "
        f"{row.median / first.median:.3f} of the first backend's; GPU {row.busy / 1e3:.3f}, "
        f"attention {row.attention / 1e3:.3f}; equal tokens {equal} of {len(row.tokens)}, "
        f"logprobs within {largest:.4f}",
        flush=True,
    )
    large: dict[str, float] = {}
    for name, us in row.kernels.items():
        if us > MIN_SHARE * row.busy:
            short = name[:NAME_LETTERS]
            large[short] = round(large.get(short, 0.0) + us, 1)
    line = {"op": "vllm_step", "case": case.name, "backend": row.engine.backend.lower(), "us": round(row.median, 1)}
    line |= {
        "us_min": round(min(row.us), 1),
        "us_max": round(max(row.us), 1),
        "gpu_us": round(row.busy, 1),
        "attention_us": round(row.attention, 1),
        "kernels": large,
        "requests": len(row.tokens),
        "agreement": {one.engine.backend.lower(): agreement(row.tokens, one.tokens) for one in rows if one is not row},
    }
    line |= {"dtype": arguments.dtype, "cache": arguments.kv_cache_dtype, "model": Path(arguments.model).name}
    line |= about | {"commit": environment.commit(), "date": time.strftime("%Y-%m-%d")}
    append_line(arguments.json, line)
