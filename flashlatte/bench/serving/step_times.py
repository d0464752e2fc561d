"""Engines of several processes timed alternately in the same cases, their tokens compared, their results recorded."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flashlatte.bench import environment
from flashlatte.bench.results import append_line
from flashlatte.bench.serving.engine_process import EngineEnded, EngineProcess
from flashlatte.bench.serving.step_cases import StepCase, cases_of

Tokens = list[list[list[float]]]  # for each request its tokens, each with its log-probability
# Kernels with a smaller share of a step are not in the line.
MIN_SHARE = 0.01
# Maximum length of a kernel's name: CUTLASS's have thousands of letters.
NAME_LETTERS = 100
# Names of attention kernels, without projections and cache writes; the name of one of vLLM's ends in sparse_attn.
ATTENTION = re.compile(
    r"dense_decode|sparse_decode|_prefill|combine|merge_|mla_metadata|flash_fwd|splitkv_mla|(?<!insert_)sparse_attn|FlashAttn"
    r"|prepare_varlen|_fwd_(grouped_)?kernel_stage"
)
# Names of the kernels that select keys, in models with an indexer. vLLM's topkGating kernels select experts.
INDEXER = re.compile(r"mqa_logits|index_logits|top[kK](?!Gating)|index_(convert|remap|gather)|gather_indexer")


@dataclasses.dataclass
class BackendTimes:
    """The times of one backend's engine in one case, in µs, and the tokens that it generated."""

    engine: EngineProcess
    us: list[float] = dataclasses.field(default_factory=list)
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    tokens: Tokens = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.us)

    def kernel_us(self, pattern: re.Pattern[str] = re.compile("")) -> float:
        """The time of the kernels whose names the pattern matches."""
        return sum(us for name, us in self.kernels.items() if pattern.search(name))


@dataclasses.dataclass(frozen=True)
class Host:
    """The parts of a comparison that depend on the serving engine.

    Attributes:
        operation: the results' ``op``.
        facts: further entries of each result.
        reference: the backend whose tokens the given one must have; None if there is none, so that the tokens are only
            compared with the first backend's.
        fault: the reason why a row must not be reported, or None.
        tolerance: largest difference of a log-probability from the reference's.
    """

    operation: str
    facts: Mapping[str, Any]
    reference: Callable[[str], str | None] = lambda backend: None
    fault: Callable[[StepCase, BackendTimes], str | None] = lambda case, row: None
    tolerance: float = math.inf


def compare(backends: list[str], engines: Iterable[EngineProcess], host: Host, options: argparse.Namespace) -> int:
    """Time the engines in all cases, print and record the results.

    A row whose tokens are wrong, or that has a fault, is printed as wrong and not recorded.

    Args:
        backends: the engines' names.
        engines: the processes; each is used before the iterator starts the next one.

    Returns:
        0, or 1 if an engine ended or a row was wrong.
    """
    about: dict[str, dict[str, Any]] = {}
    rows = surviving(map(BackendTimes, engines), lambda row: about.update({row.engine.backend: row.engine.answer()}))
    ratios: dict[str, list[float]] = {backend: [] for backend in about}
    is_wrong = False
    for case in cases_of(options):
        rows = measured(case, [BackendTimes(row.engine) for row in rows], options.rounds)
        for row in rows:
            backend = row.engine.backend
            if wrong := fault_of(case, row, rows, host):
                print(f"{case.name:>14} {backend:<24} WRONG: {wrong}", file=sys.stderr, flush=True)
                is_wrong = True
                continue
            print(summary(case, row, rows, host), flush=True)
            append_line(options.json, result_line(case, row, rows, host, about[backend]))
            ratios[backend].append(row.median / rows[0].median)
    for backend, values in ratios.items():
        if values:
            mean = statistics.geometric_mean(values)
            print(f"{backend}: {mean:.3f} times as long as {backends[0]} (geometric mean of {len(values)} cases)")
    return 1 if is_wrong or len(rows) < len(backends) else 0


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

    def compare_tokens(row: BackendTimes) -> None:
        row.tokens = row.engine.ask(*case.compare)
        row.engine.ask(*case.prepare)

    def time_once(row: BackendTimes) -> None:
        row.us.append(row.engine.ask(*case.measure))

    def profile(row: BackendTimes) -> None:
        row.kernels = row.engine.ask(*case.profile)

    left = surviving(rows, compare_tokens)
    for _ in range(rounds):
        left = surviving(left, time_once)[::-1]
    left = surviving(left, profile)
    return [row for row in rows if row in left]


def equal_tokens(ours: list[list[float]], theirs: list[list[float]]) -> int:
    """The tokens of a request before the first different one."""
    pairs = list(zip(ours, theirs, strict=True))
    return next((i for i, (one, other) in enumerate(pairs) if one[0] != other[0]), len(pairs))


def agreement(tokens: Tokens, others: Tokens) -> tuple[int, float]:
    """The requests with equal tokens, and the largest difference of a log-probability before a token differs."""
    equal, largest = 0, 0.0
    for ours, theirs in zip(tokens, others, strict=True):
        count = equal_tokens(ours, theirs)
        equal += count == len(ours)
        largest = max([largest, *(abs(ours[i][1] - theirs[i][1]) for i in range(count))])
    return equal, largest


def first_difference(tokens: Tokens, others: Tokens) -> int | None:
    """The earliest position in which tokens of a request differ, or None."""
    counts = [equal_tokens(ours, theirs) for ours, theirs in zip(tokens, others, strict=True)]
    return min((count for count, ours in zip(counts, tokens, strict=True) if count < len(ours)), default=None)


def largest_error(tokens: Tokens, others: Tokens) -> float:
    """The largest difference of a log-probability up to the first different token; NaN if one is NaN.

    Both engines take the most probable token, so that the log-probabilities of two different tokens with nearly the
    same logits are nearly equal, too.
    """
    errors = [0.0]
    for ours, theirs in zip(tokens, others, strict=True):
        compared = min(equal_tokens(ours, theirs) + 1, len(ours))
        errors += [abs(ours[i][1] - theirs[i][1]) for i in range(compared)]
    return next((error for error in errors if math.isnan(error)), max(errors))


def fault_of(case: StepCase, row: BackendTimes, rows: list[BackendTimes], host: Host) -> str | None:
    """The reason why a row must not be reported, or None."""
    name = host.reference(row.engine.backend)
    if name is not None:
        reference = next((one for one in rows if one.engine.backend == name), None)
        if reference is None:
            return f"there are no tokens of {name} to compare with"
        error = largest_error(row.tokens, reference.tokens)
        if not error <= host.tolerance:
            return f"a log-probability differs by {error:.4f} from that of {name}"
    return host.fault(case, row)


def summary(case: StepCase, row: BackendTimes, rows: list[BackendTimes], host: Host) -> str:
    """The line of a row for a terminal."""
    name = host.reference(row.engine.backend)
    reference = next((one for one in rows if one.engine.backend == name), rows[0])
    equal, largest = agreement(row.tokens, reference.tokens)
    first = first_difference(row.tokens, reference.tokens)
    indexer = row.kernel_us(INDEXER)
    return (
        f"{case.name:>14} {row.engine.backend:<24}{row.median / 1e3:>9.3f} ms, "
        f"{row.median / rows[0].median:.3f} of the first backend's; GPU {row.kernel_us() / 1e3:.3f}, "
        f"attention {row.kernel_us(ATTENTION) / 1e3:.3f}{f', indexer {indexer / 1e3:.3f}' if indexer else ''}; "
        f"equal tokens {equal} of {len(row.tokens)}{'' if first is None else f', first difference at token {first}'}, "
        f"logprobs within {largest:.4f}"
    )


def result_line(
    case: StepCase, row: BackendTimes, rows: list[BackendTimes], host: Host, about: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON line of a row."""
    busy = row.kernel_us()
    large: dict[str, float] = {}
    for name, us in row.kernels.items():
        if us > MIN_SHARE * busy:
            short = name[:NAME_LETTERS]
            large[short] = round(large.get(short, 0.0) + us, 1)
    return {
        "op": host.operation,
        "case": case.name,
        "backend": row.engine.backend.lower(),
        "us": round(row.median, 1),
        "us_min": round(min(row.us), 1),
        "us_max": round(max(row.us), 1),
        "gpu_us": round(busy, 1),
        "attention_us": round(row.kernel_us(ATTENTION), 1),
        "indexer_us": round(row.kernel_us(INDEXER), 1),
        "kernels": large,
        "requests": len(row.tokens),
        "agreement": {one.engine.backend.lower(): agreement(row.tokens, one.tokens) for one in rows if one is not row},
        **host.facts,
        **about,
        "commit": environment.commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
