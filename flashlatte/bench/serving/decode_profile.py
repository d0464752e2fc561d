"""Shares of the engine's decode steps, from the kernels that a GPU ran and their times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashlatte.bench.timing import microseconds
from flashlatte.engine import Engine, SamplingParams

# Substrings of kernel names. A kernel that matches none is "other": the model's own layers, and sampling.
KINDS = {
    "attention": ("dense_decode", "sparse_decode", "combine_kernel", "merge_kernel", "clear_kernel"),
    "cache": ("latent_rows", "rotate_heads", "write_rows", "write_tiles", "cache_indices"),
    "matrices": ("gemm", "nvjet", "gemv", "cutlass", "splitK"),
    "copies": ("Memcpy", "Memset"),
}
# Longer than the pauses between the kernels of a graph: in a longer pause the GPU waited for the host.
HOST_PAUSE_US = 5.0
SETTLING, TIMED, PROFILED = 20, 50, 10
KERNELS_SHOWN = 12


@dataclass(frozen=True)
class KernelSpan:
    """A kernel or copy from ``begin`` to ``end``, in microseconds."""

    name: str
    begin: float
    end: float


def decode_step(model: Any, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """A decode step of as many requests as there are prompts: its time, and the shares of it.

    ``idle`` is the share of a step in which no kernel runs, ``waits_for_host`` the share of pauses above HOST_PAUSE_US.
    Both are upper bounds, because the profiler slows the host down. ``step_us`` is timed without the profiler.
    """
    requests = len(prompts)
    served = Engine(model, max_num_seqs=requests, max_num_batched_tokens=8192, num_pages=requests * 12)
    # Requests whose prompts are computed first generate until all prompts are computed.
    length = SETTLING + TIMED + PROFILED + 60
    for prompt in prompts:
        served.add(prompt, SamplingParams(temperature=0, max_tokens=length))
    while len(served.step()) < requests:
        pass
    _run(served, SETTLING)
    step_us = _run(served, TIMED) / TIMED
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        profiled_us = _run(served, PROFILED) / PROFILED
    assert served.unfinished == requests
    spans = [
        KernelSpan(event.name, event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return {"requests": requests, "step_us": step_us, "profiled_step_us": profiled_us, **shares(spans, PROFILED)}


def shares(spans: Sequence[KernelSpan], steps: int) -> dict[str, Any]:
    """Shares of the time from the first span's begin to the last one's end, and the kernels that take most of it."""
    spans = sorted(spans, key=lambda span: span.begin)
    total = max(span.end for span in spans) - spans[0].begin
    pauses, reached = [], spans[0].begin
    for span in spans:
        pauses.append(max(span.begin - reached, 0.0))
        reached = max(reached, span.end)
    times: dict[str, float] = defaultdict(float)
    kinds: dict[str, float] = defaultdict(float)
    for span in spans:
        times[span.name] += span.end - span.begin
        kinds[_kind(span.name)] += span.end - span.begin
    return {
        "idle": sum(pauses) / total,
        "waits_for_host": sum(pause for pause in pauses if pause > HOST_PAUSE_US) / total,
        "kernels_a_step": len(spans) / steps,
        "shares": _largest(kinds, total),
        "longest": _largest(times, total),
    }


def _largest(times: Mapping[str, float], total: float) -> dict[str, float]:
    ordered = sorted(times.items(), key=lambda item: -item[1])
    return {name[:60]: round(time / total, 4) for name, time in ordered[:KERNELS_SHOWN]}


def _kind(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


def _run(served: Engine, steps: int) -> float:
    return microseconds(lambda: [served.step() for _ in range(steps)])
