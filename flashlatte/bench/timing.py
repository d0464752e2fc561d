"""Times of calls, and the rates of a matmul and a copy in the same run."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")
Call = Callable[[], object]

CALLS_IN_GRAPH = 10
HOST_CALLS, HOST_CALLS_BEFORE_WAIT = 1000, 20
CPU_CALLS = 3
MATMUL_SIZE = 8192
COPY_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Ceilings:
    """The chip's rates in this run.

    Attributes:
        matmul_tflops: an 8192³ bf16 matmul of random numbers.
        copy_gbps: a device-to-device copy, bytes read plus bytes written.
    """

    matmul_tflops: float
    copy_gbps: float


def device_microseconds(call: Call) -> float:
    """Median over many calls on the device, the L2 flushed before each."""
    from triton import testing

    was_collecting = gc.isenabled()
    # A collection during do_bench's few calibration calls would make it time only a handful of calls.
    gc.disable()
    try:
        return testing.do_bench(call, return_mode="median") * 1e3  # pyright: ignore[reportOperatorIssue]
    finally:
        if was_collecting:
            gc.enable()


def capture(call: Callable[[], T], calls: int = CALLS_IN_GRAPH) -> tuple[torch.cuda.CUDAGraph, T]:
    """A CUDA graph of ``calls`` calls, and the last one's results, which a replay overwrites."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for _ in range(calls)]
    return graph, results[-1]


def host_microseconds(call: Call) -> float:
    """Median time until a call returns to the host, which waits for the device only between bursts of calls."""
    times = []
    for _ in range(HOST_CALLS // HOST_CALLS_BEFORE_WAIT):
        torch.cuda.synchronize()
        for _ in range(HOST_CALLS_BEFORE_WAIT):
            begin = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - begin)
    torch.cuda.synchronize()
    return statistics.median(times) / 1e3


def cpu_microseconds(call: Call) -> float:
    """Median of a few calls on the CPU."""
    times = []
    for _ in range(CPU_CALLS):
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e3


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def microseconds(run: Callable[[], object]) -> float:
    """µs until the GPU has done what ``run`` launched."""
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return (time.perf_counter() - began) * 1e6


def kernel_times(run: Callable[[], object]) -> dict[str, float]:
    """µs of each kernel in ``run``, as ``times_of_spans`` divides them; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        synchronize()
    return times_of_spans(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events() or ()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    )


def times_of_spans(spans: Iterable[tuple[float, float, str]]) -> dict[str, float]:
    """The time of each name in ``spans`` of (begin, end, name). Where spans overlap, the one that began first counts.

    With programmatic dependent launch, a kernel starts before the preceding one has ended, and waits for it. The
    profiler reports this time for both.
    """
    times: dict[str, float] = {}
    reached = -math.inf
    for begin, end, name in sorted(spans):
        times[name] = times.get(name, 0.0) + max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return {name: us for name, us in times.items() if us}


def measure_ceilings(device: torch.device) -> Ceilings:
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(a)
    matmul = device_microseconds(lambda: torch.mm(a, b, out=product))
    free_bytes, _ = torch.cuda.mem_get_info(device)
    source = torch.empty(min(COPY_BYTES, free_bytes // 4), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = device_microseconds(lambda: target.copy_(source))
    return Ceilings(2 * MATMUL_SIZE**3 / matmul / 1e6, 2 * source.numel() / copy / 1e3)
