"""What the benchmarks over several GPUs share: a process of a rank, graphs, and times in turns of the slowest rank."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

ROUNDS, REPLAYS = 12, 10


def report(figures: Callable[[], Iterable[dict[str, object]]], file: Path | None) -> None:
    """Join the ranks, measure, and let the first of them print each figure and append it to ``file``."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    try:
        about = {"gpus": dist.get_world_size(), "device": torch.cuda.get_device_name()}
        about["commit"] = os.environ.get("FLASHLATTE_COMMIT", "")
        for line in figures():
            if dist.get_rank() == 0:
                text = json.dumps(line | about)
                print(text, flush=True)
                if file is not None:
                    with file.open("a") as lines:
                        lines.write(text + "\n")
    finally:
        dist.destroy_process_group()


def check(out: torch.Tensor, wanted: torch.Tensor, what: str, ulps: int = 2) -> None:
    """Averages of thousands of values: an ulp of bf16 is at most 2^-8 of the largest."""
    worst = (out.float() - wanted.float()).abs().max().item()
    if not worst <= ulps * 2**-8 * wanted.float().abs().max().item():
        raise SystemExit(f"{what} is wrong on rank {dist.get_rank()}: differs by {worst} from one GPU")


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """``REPLAYS`` calls in a CUDA graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPLAYS):
            call()
    return graph.replay


def in_turns(calls: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds of each, the median over the rounds of the slowest rank's."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in list(calls) if turn % 2 else reversed(list(calls)):
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
