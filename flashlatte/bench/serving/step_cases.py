"""The cases of ``flashlatte bench vllm-steps`` and ``sglang-steps``: the requests to each engine."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

from flashlatte.bench.alternate import add_json_option

WARM_STEPS = 3
# Number of generated tokens of each request that are compared between engines.
COMPARED_TOKENS = 8
# The kind of requests that are prefilled even with random contexts.
PREFILLED = "prefilled."


@dataclasses.dataclass(frozen=True)
class StepCase:
    """The requests to each engine: the names and arguments of methods of the object in its process."""

    name: str
    compare: tuple[Any, ...]
    prepare: tuple[Any, ...]
    measure: tuple[Any, ...]
    profile: tuple[Any, ...]
    is_decode: bool


def add_case_arguments(parser: argparse.ArgumentParser, cases: str, prefill: str) -> None:
    """Add the options that ``cases_of``, ``step_times.compare`` and the engines read; two have their defaults here."""
    add = parser.add_argument
    add("--layers", type=int, default=3, help="layers of a model that is given by name (default 3)")
    add("--cases", default=cases, help=f"requests x tokens of context, separated by commas (default {cases})")
    add("--prefill", default=prefill, help=f"tokens of prompts whose prefill is timed (default {prefill or 'none'})")
    add("--steps", type=int, default=16, help="decode steps of a measurement (default 16)")
    add("--rounds", type=int, default=4, help="measurements of each backend (default 4)")
    add_json_option(parser)


def cases_of(options: argparse.Namespace) -> list[StepCase]:
    decode = [
        StepCase(
            f"b{requests}-{context}",
            ("tokens", requests, context),
            ("start", requests, context),
            ("time", options.steps),
            ("kernels", "time", WARM_STEPS),
            is_decode=True,
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
            is_decode=False,
        )
        for length in lengths_of(options.prefill)
    ]
    return decode + prefill


def parsed(cases: str) -> list[tuple[int, int]]:
    """Requests and tokens of context of each decode case.

    Raises:
        ValueError: a case is not of the form ``REQUESTSxCONTEXT``.
    """
    pairs = [case.split("x") for case in cases.split(",") if case]
    if not all(len(pair) == 2 and all(number.isdecimal() and int(number) > 0 for number in pair) for pair in pairs):
        raise ValueError(f"--cases must be requests x tokens of context, such as 1x4096,32x4096, got {cases!r}")
    return [(int(requests), int(context)) for requests, context in pairs]


def lengths_of(prefill: str) -> list[int]:
    return [int(length) for length in prefill.split(",") if length]


def generated_tokens(options: argparse.Namespace) -> int:
    """Tokens that a request generates while its case is measured, at most."""
    return (options.rounds + 1) * options.steps + 2 * COMPARED_TOKENS


def request_names(count: int, kind: str = "") -> list[str]:
    """New names for vLLM's requests, which begin with ``kind``: empty, or ``PREFILLED``."""
    return [f"{kind}{number}.{time.monotonic_ns()}" for number in range(count)]


def request_number(name: str) -> int:
    """The number in the name of a request with a random context. vLLM may append to names."""
    return int(name.split(".")[0])
