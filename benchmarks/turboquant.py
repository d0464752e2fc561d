"""Time TurboQuant's decode beside bf16 paged attention, in turns, and its store and gather.

PYTHONPATH=. python benchmarks/turboquant.py [--section NAME] [--json benchmarks/results/turboquant.jsonl]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import checked
import torch

from flashlatte.bench.problems import TurboQuantDecode, TurboQuantStore
from flashlatte.bench.workloads import draw, prepare
from flashlatte.bench.workloads.base import Results, spread
from flashlatte.bench.workloads.turboquant import TurboQuantDecodeWorkload
from flashlatte.kv_cache import turboquant
from flashlatte.ops.paged_attention import paged_attention
from flashlatte.ops.turboquant_gather import turboquant_gather
from flashlatte.ops.turboquant_store import turboquant_store

H_Q, H_KV, D, PAGE_SIZE = 32, 8, 128, 64


def decode(device: torch.device) -> Iterator[list[checked.Case]]:
    """64 requests of 8,192 keys in CUDA graphs; then the same in vLLM's strides, and a single request."""
    problems = [TurboQuantDecode(name, 64, 8192) for name in turboquant.TURBOQUANT_NAMES]
    bf16 = bf16_decode(*((64, 8192) if device.type == "cuda" else (2, 100)), device)
    yield [bf16, *(checked.of_problem(problem, device, method="graph") for problem in problems)]
    four_bits = problems[1] if device.type == "cuda" else problems[1].scaled_down()
    workload = prepare(four_bits, device)
    assert isinstance(workload, TurboQuantDecodeWorkload)
    workload.cache = workload.cache.contiguous()  # records side by side, without the gap that aligns heads
    moved, more = workload.bytes_moved, {"variant": "vLLM's strides"}
    yield [
        checked.Case(
            four_bits.operation, four_bits.name, workload.run, workload.check, moved, method="graph", more=more
        )
    ]
    del workload
    yield [checked.of_problem(TurboQuantDecode("turboquant_4bit_nc", 1, 8192), device, method="graph")]


def bf16_decode(batch: int, keys: int, device: torch.device) -> checked.Case:
    rng = draw.generator(device)
    pages = -(-keys // PAGE_SIZE)
    shape = (batch * pages, PAGE_SIZE, H_KV, D)
    k_cache, v_cache = (draw.normal(shape, torch.bfloat16, rng) for _ in range(2))
    q, table = draw.normal((batch, H_Q, D), torch.bfloat16, rng) * 10, draw.block_table(batch, pages, rng)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=device)
    boundaries = torch.arange(batch + 1, dtype=torch.int32, device=device)
    chosen = spread(batch, 4, device)

    def call(rows: torch.Tensor | slice, backend: str) -> Results:
        queries = q[rows]
        out, lse = paged_attention(
            queries, k_cache, v_cache, table[rows], lengths[rows], boundaries[: len(queries) + 1], backend=backend
        )
        return {"out": out, "lse": lse}

    return checked.Case(
        "paged_attention",
        f"bf16-b{batch}-h{H_Q}-{H_KV}-k{keys}",
        lambda backend: call(slice(None), backend),
        checked.against(
            lambda: call(chosen, "reference"),
            {"out": checked.ROUNDED, "lse": checked.ROUNDED},
            lambda results: {name: result[chosen] for name, result in results.items()},
        ),
        checked.nbytes(q, q) + 2 * 2 * batch * keys * H_KV * D,
        method="graph",
    )


def store(device: torch.device) -> Iterator[list[checked.Case]]:
    for name in turboquant.TURBOQUANT_NAMES:
        yield [checked.of_problem(TurboQuantStore(name, 65536), device)]


def gather(device: torch.device) -> Iterator[list[checked.Case]]:
    """One request's tokens, from pages in random order to contiguous keys and values in bf16."""
    tokens = 65536 if device.type == "cuda" else 100
    rng = draw.generator(device)
    pages = -(-tokens // PAGE_SIZE)
    key, value = (draw.normal((tokens, H_KV, D), torch.bfloat16, rng) for _ in range(2))
    table = draw.block_table(1, pages, rng)
    boundaries = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    for name in turboquant.TURBOQUANT_NAMES:
        cache = turboquant.allocate(name, pages, PAGE_SIZE, H_KV, D, device=device)
        turboquant_store(key, value, cache, torch.arange(tokens, device=device))

        def call(backend: str, cache: torch.Tensor = cache) -> Results:
            found = turboquant_gather(cache, table, boundaries, tokens, D, backend=backend)
            return dict(zip(("key", "value"), found, strict=True))

        record = turboquant.turboquant_format(name, D).record_bytes
        yield [
            checked.Case(
                "turboquant_gather",
                f"{name.removeprefix('turboquant_')}-t{tokens}-h{H_KV}",
                call,
                checked.against(lambda call=call: call("reference"), dict.fromkeys(("key", "value"), checked.ROUNDED)),
                checked.nbytes(key, value) + tokens * H_KV * record,
            )
        ]


SECTIONS: checked.Sections = {"decode": decode, "store": store, "gather": gather}

if __name__ == "__main__":
    sys.exit(checked.main(__doc__ or "", SECTIONS))
