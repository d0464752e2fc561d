"""Shared by the benchmarks on several GPUs: a rank's process, graphs, and alternating times of the slowest rank."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from flashlatte.bench import environment, timing
from flashlatte.bench.results import append_line

ROUNDS, REPLAYS = 12, 10


def report(figures: Callable[[], Iterable[dict[str, object]]], file: Path | None) -> int:
    """Join the ranks and measure; the first rank prints each line and appends it to ``file``."""
    if "LOCAL_RANK" not in os.environ or not torch.cuda.is_available():
        raise ValueError("run this with torchrun: torchrun --nproc-per-node 4 -m flashlatte bench ..., on CUDA GPUs")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    try:
        about = {"gpus": dist.get_world_size()} | dataclasses.asdict(environment.describe(device))
        for line in figures():
            if dist.get_rank() == 0:
                print(json.dumps(line | about), flush=True)
                append_line(file, line | about)
    finally:
        dist.destroy_process_group()
    return 0


def check(out: torch.Tensor, wanted: torch.Tensor, name: str, ulps: int = 2) -> None:
    """Check averages of thousands of values within ``ulps`` bf16 ulps, each at most 2^-8 of the largest value."""
    worst = (out.float() - wanted.float()).abs().max().item()
    if not worst <= ulps * 2**-8 * wanted.float().abs().max().item():
        raise SystemExit(f"{name} is wrong on rank {dist.get_rank()}: differs by {worst} from one GPU")


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """``REPLAYS`` calls in a CUDA graph."""
    return timing.capture(call, REPLAYS)[0].replay


def alternating_ms(calls: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds of each call: the median over rounds of the slowest rank's time."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls) if number % 2 else reversed(list(calls)):
            dist.barrier()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            calls[name]()
            end.record()
            end.synchronize()
            slowest = torch.tensor(begin.elapsed_time(end), device="cuda")
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times[name].append(slowest.item())
    return {name: statistics.median(taken) for name, taken in times.items()}
