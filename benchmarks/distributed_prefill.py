"""The attention of one long prompt over several GPUs, beside the same on one.

    PYTHONPATH=. torchrun --nproc-per-node 4 benchmarks/distributed_prefill.py [--tokens 131072] [--json FILE]

128 heads of 192 and 128 numbers, latents of 512 + 64, bf16. Both expand latents to keys and values, and that is timed
too; the result is checked against one GPU's. Times are medians of calls in turns, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from flashlatte import dense_prefill
from flashlatte.distributed import PrefillRing

LATENT, NOPE, ROPE, V = 512, 128, 64, 128
ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072, help="of the prompt")
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--json", type=Path, help="append a line to this file")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    try:
        line = figures(arguments.tokens, arguments.heads)
        if dist.get_rank() == 0:
            print(json.dumps(line))
            if arguments.json is not None:
                with arguments.json.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    finally:
        dist.destroy_process_group()


def figures(tokens: int, heads: int) -> dict[str, object]:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, rows = draw(tokens, heads, NOPE + ROPE), draw(tokens, LATENT + ROPE)
    up = draw(LATENT, heads * (NOPE + V)) / LATENT**0.5

    def expand(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nope, values = (rows[:, :LATENT] @ up).unflatten(-1, (heads, NOPE + V)).split((NOPE, V), dim=-1)
        keys = rows.new_empty(len(rows), heads, NOPE + ROPE)
        keys[..., :NOPE], keys[..., NOPE:] = nope, rows[:, None, LATENT:]
        return keys, values

    ends = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
    ring = PrefillRing()
    here = ring.positions(tokens, device="cuda")
    my_q, my_rows = q[here], rows[here]
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "one": lambda: dense_prefill(q, *expand(rows), ends, ends, tokens, tokens, causal=True)[0],
        "ring": lambda: ring.attend(my_q, my_rows, expand, tokens=tokens)[0],
    }
    wanted = calls["one"]()[here]
    worst = (calls["ring"]() - wanted).abs().max().item()
    if not worst <= 2 * 2**-8 * wanted.abs().max().item():
        raise SystemExit(f"the ring is wrong on rank {dist.get_rank()}: differs by {worst} from one GPU")
    del wanted
    times = in_turns(calls)
    return {
        "tokens": tokens,
        "heads": heads,
        "gpus": dist.get_world_size(),
        "device": torch.cuda.get_device_name(),
        "one_ms": round(times["one"], 2),
        "ring_ms": round(times["ring"], 2),
        "times one GPU": round(times["one"] / times["ring"], 2),
    }


def in_turns(calls: dict[str, Callable[[], torch.Tensor]]) -> dict[str, float]:
    """Milliseconds of each, of its slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS):
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


if __name__ == "__main__":
    main()
