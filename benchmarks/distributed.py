"""Decode over keys on several GPUs, beside the same on one: whole, in each form, and what is communication.

    PYTHONPATH=. torchrun --nproc-per-node 4 benchmarks/distributed.py [--case long|wide] [--json FILE]

128 heads, bf16, one new token a request. long: 4 requests of 524,288 tokens; wide: 64 of 32,768. Each form is checked
against the result of one GPU, then timed as a CUDA graph, the median of replays in turns with the others; a time is the
slowest rank's. "communication" is the gathering of queries, the exchange and the merge, without attention.
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

from flashlatte import dense_decode
from flashlatte.distributed import ContextParallel, merge

HEADS, DIM, VALUE, PAGE = 128, 576, 512, 64
CASES = {"long": (4, 524_288), "wide": (64, 32_768)}
ROUNDS, REPLAYS = 12, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--json", type=Path, help="append a line a figure to this file")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    try:
        for name in arguments.case or CASES:
            for line in figures(name):
                if dist.get_rank() == 0:
                    print(json.dumps(line), flush=True)
                    if arguments.json is not None:
                        with arguments.json.open("a") as file:
                            file.write(json.dumps(line) + "\n")
    finally:
        dist.destroy_process_group()


def figures(case: str) -> list[dict[str, object]]:
    batch, length = CASES[case]
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator("cuda").manual_seed(0)
    columns = length // PAGE
    # Every rank draws the whole problem, so that each can check its heads.
    table = torch.randperm(batch * columns, device="cuda", generator=generator).view(batch, columns).int()
    whole = torch.randn(batch * columns, PAGE, 1, DIM, device="cuda", dtype=torch.bfloat16, generator=generator)
    q = torch.randn(batch, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16, generator=generator)
    lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)

    def alone() -> torch.Tensor:
        return dense_decode(q, whole, table, lengths)[0]

    contexts = {form: ContextParallel(interleave=1, form=form) for form in merge.FORMS}
    mine = q.chunk(size, 2)[rank].contiguous()
    share = sharded(whole, table, size, rank)
    shared_table = torch.arange(batch * columns // size, device="cuda", dtype=torch.int32).view(batch, -1)
    calls: dict[str, Callable[[], object]] = {"one GPU": alone}
    for form, context in contexts.items():
        plan = context.plan(shared_table, lengths, page_tokens=PAGE * size)
        calls[form] = decode_call(context, mine, share, plan)
        check(calls[form]()[0], alone().chunk(size, 2)[rank], form)  # type: ignore[index]
        calls[f"{form}, communication"] = communication_call(context, mine)
    times = in_turns({name: captured(call) for name, call in calls.items()})
    one = times["one GPU"]
    about = {"case": case, "gpus": size, "device": torch.cuda.get_device_name()}
    return [
        about | {"what": name, "us": round(time, 1), "times one GPU": round(one / time, 2)}
        for name, time in times.items()
    ]


def decode_call(context: ContextParallel, q: torch.Tensor, cache: torch.Tensor, plan: object) -> Callable[[], object]:
    return lambda: context.decode(q, cache, plan)  # type: ignore[arg-type]


def communication_call(context: ContextParallel, q: torch.Tensor) -> Callable[[], object]:
    form, tokens = context.form or "all_to_all", q.shape[0]
    partial = merge.allocate(tokens, HEADS, VALUE, q.dtype, q.device, form)
    partial.out.normal_()
    partial.lse.normal_()

    def run() -> object:
        return merge.gather_heads(q.flatten(0, 1), context.group), merge.merge(partial, context.group, form)

    return run


def sharded(whole: torch.Tensor, table: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """This rank's tokens of each request, one of ``size``, in pages one after the other."""
    shares = [whole[pages.long()].flatten(0, 1)[rank::size] for pages in table]
    return torch.cat(shares).unflatten(0, (-1, PAGE))


def check(out: torch.Tensor, wanted: torch.Tensor, form: str) -> None:
    worst = (out.float() - wanted.float()).abs().max().item()
    # Outputs are averages of thousands of values: an ulp of bf16 is at most 2^-8 of the largest.
    if not worst <= 2 * 2**-8 * wanted.float().abs().max().item():
        raise SystemExit(f"{form} is wrong on rank {dist.get_rank()}: differs by {worst} from one GPU")


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPLAYS):
            call()
    return graph


def in_turns(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Microseconds of each, of its slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(ROUNDS):
        for name in list(graphs) if turn % 2 else reversed(list(graphs)):
            dist.barrier()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            slowest = torch.tensor(begin.elapsed_time(end) * 1e3 / REPLAYS, device="cuda")
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times[name].append(slowest.item())
    return {name: statistics.median(taken) for name, taken in times.items()}


if __name__ == "__main__":
    main()
