"""Requests of ``flashlatte bench vllm-steps``: their names, by which an engine's parts know them, and their prompts."""

from __future__ import annotations

import random
import time

# Begins the names of requests without a random context.
PREFILLED = "prefilled."
# A longer prompt repeats its first tokens: to draw millions takes longer than to measure.
DRAWN_TOKENS = 512


def request_names(count: int, kind: str = "") -> list[str]:
    """New names; ``kind`` is empty or ``PREFILLED``."""
    return [f"{kind}{number}.{time.monotonic_ns()}" for number in range(count)]


def request_number(name: str) -> int:
    """The number in the name of a request with a random context. vLLM may append to names."""
    return int(name.split(".")[0])


def prompt(draw: random.Random, vocabulary: int, length: int) -> list[int]:
    drawn = draw.choices(range(vocabulary), k=min(length, DRAWN_TOKENS))
    return (drawn * -(-length // DRAWN_TOKENS))[:length]
