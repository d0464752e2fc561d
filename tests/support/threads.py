"""Runs a function in several threads that begin together and switch often."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
NUM_THREADS = 8


def at_the_same_time(run: Callable[[int], T], threads: int = NUM_THREADS, timeout: float = 120.0) -> list[T]:
    """The results of ``run(number)`` in each thread. Raises the first error of one."""
    barrier = threading.Barrier(threads)

    def begin(number: int) -> T:
        barrier.wait(timeout)
        return run(number)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            return [future.result(timeout) for future in [pool.submit(begin, number) for number in range(threads)]]
    finally:
        sys.setswitchinterval(before)
