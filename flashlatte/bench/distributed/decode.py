"""Decode with keys sharded over several GPUs, in each form, compared with one GPU; and the communication alone.

    torchrun --nproc-per-node 4 -m flashlatte bench distributed-decode [--case long|wide|curve] [--json FILE]

128 heads, bf16, one new token per request. long: 4 requests of 524,288 tokens; wide: 64 of 32,768; curve: one form
only, 4 requests of 8,192 to 1,048,576 tokens (``flashlatte bench plot distributed`` draws it). Each form is checked
against one GPU, then timed as a CUDA graph: the median of replays that alternate with the others, a time being the
slowest rank's. "communication" is the gathering of queries, the exchange and the merge, without attention.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from flashlatte import dense_decode
from flashlatte.bench.alternate import add_json_option
from flashlatte.bench.distributed.ranks import REPLAYS, alternating_ms, captured, check, report
from flashlatte.distributed import ContextParallel, merge
from flashlatte.distributed.agreement import Agreement
from flashlatte.distributed.context_parallel import FORMS
from flashlatte.distributed.direct import Direct
from flashlatte.distributed.peer_memory import PeerMemory

HEADS, DIM, VALUE, PAGE = 128, 576, 512, 64
CASES = {"long": [(4, 524_288)], "wide": [(64, 32_768)], "curve": [(4, 2**power) for power in range(13, 21)]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", choices=CASES, action="append", help="default: all (may be repeated)")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    problems = [(name, *sizes) for name in options.case or CASES for sizes in CASES[name]]
    return report(lambda: (line for problem in problems for line in figures(*problem)), options.json)


def figures(case: str, batch: int, length: int) -> list[dict[str, object]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator("cuda").manual_seed(0)
    columns = length // PAGE
    # Every rank draws the whole problem to check its heads.
    table = torch.randperm(batch * columns, device="cuda", generator=generator).view(batch, columns).int()
    whole = torch.randn(batch * columns, PAGE, 1, DIM, device="cuda", dtype=torch.bfloat16, generator=generator)
    q = torch.randn(batch, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16, generator=generator)
    lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)

    def one_gpu() -> torch.Tensor:
        return dense_decode(q, whole, table, lengths)[0]

    contexts = {form: ContextParallel(interleave=1, form=form) for form in (FORMS[:1] if case == "curve" else FORMS)}
    mine = q.chunk(size, 2)[rank].contiguous()
    share = sharded(whole, table, size, rank)
    shared_table = torch.arange(batch * columns // size, device="cuda", dtype=torch.int32).view(batch, -1)
    calls: dict[str, Callable[[], object]] = {"one GPU": one_gpu}
    for form, context in contexts.items():
        plan = context.plan(shared_table, lengths, page_tokens=PAGE * size)
        calls[form] = functools.partial(context.decode, mine, share, plan)
        check(context.decode(mine, share, plan)[0], one_gpu().chunk(size, 2)[rank], form)
        calls[f"{form}, communication"] = communication_call(context, mine)
    times = alternating_ms({name: captured(call) for name, call in calls.items()})
    one = times["one GPU"]
    about = {"case": case, "batch": batch, "keys": length}
    return [
        about | {"what": name, "us": round(time * 1e3 / REPLAYS, 1), "times one GPU": round(one / time, 2)}
        for name, time in times.items()
    ]


def communication_call(context: ContextParallel, q: torch.Tensor) -> Callable[[], object]:
    form, flat = context.form or "", q.flatten(0, 1)
    if form == "direct":
        memory = PeerMemory.connect(context.group, q.device, Agreement(context.group, timedelta(seconds=60)))
        if isinstance(memory, str):
            raise SystemExit(memory)
        direct = Direct.take(memory, flat, HEADS, VALUE, all_heads=False)
        fill(direct.partial)
        return lambda: (direct.gather(flat), direct.merge())
    partial = merge.allocate(flat.shape[0], HEADS, VALUE, q.dtype, q.device, form)
    fill(partial)
    return lambda: (merge.gather_heads(flat, context.group), merge.merge(partial, context.group, form))


def fill(partial: merge.RankPartial) -> None:
    partial.out.normal_()
    partial.lse.normal_()


def sharded(whole: torch.Tensor, table: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """This rank's tokens of each request, every ``size``-th, in consecutive pages."""
    shares = [whole[pages.long()].flatten(0, 1)[rank::size] for pages in table]
    return torch.cat(shares).unflatten(0, (-1, PAGE))
