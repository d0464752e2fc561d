"""Names of the requests of ``flashlatte bench vllm-steps``, by which the parts of an engine recognize them."""

from __future__ import annotations

import time


def request_names(count: int, kind: str = "") -> list[str]:
    """New names, which begin with ``kind``: empty, or ``step_cases.PREFILLED``."""
    return [f"{kind}{number}.{time.monotonic_ns()}" for number in range(count)]


def request_number(name: str) -> int:
    """The number in the name of a request with a random context. vLLM may append to names."""
    return int(name.split(".")[0])
