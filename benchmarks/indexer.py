"""Time the sparse-attention indexer's operations on a GPU, and variants of its portable logits; top-k: ``topk.py``.

    python benchmarks/indexer.py [--section NAME ...] [--out DIRECTORY]

Each section runs in a process of its own with a time limit. A table comes last; the directory gets the whole output.
Beside our times stand the best of others' on one H100 and the floor that was set. That results are right is for
``tests/gpu/test_indexer.py`` and ``flashlatte bench``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import torch

CUDA = torch.device("cuda")
SECTIONS = {"logits": 120, "rest": 90}


def median_us(call) -> float:
    from triton import testing

    return testing.do_bench(call, warmup=10, rep=60, return_mode="median") * 1e3


def row(name: str, us: float, others: float | None = None, floor: float | None = None, note: str = "") -> None:
    parts = [f"ROW {name:<44}{us:>9.1f} µs"]
    parts += [f"others {others:g}" if others else "", f"floor {floor:g}" if floor else "", note]
    print("  ".join(part for part in parts if part), flush=True)


def captured(call):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def prefill(m: int, n: int, heads: int):
    q = torch.randn(m, heads, 128, device=CUDA).to(torch.float8_e4m3fn)
    k = torch.randn(n, 128, device=CUDA).to(torch.float8_e4m3fn)
    end = (n - m + 1 + torch.arange(m, device=CUDA)).int()
    return q, k, torch.rand(n, device=CUDA) + 0.5, torch.randn(m, heads, device=CUDA), torch.zeros_like(end), end


class Decode:
    def __init__(self, batch: int, keys: int, heads: int = 64, next_n: int = 1) -> None:
        from flashlatte import kv_cache
        from flashlatte.ops.index_quantize import index_quantize

        pages = keys // 64 + 1
        self.cache = kv_cache.allocate("index_fp8", batch * pages, 64, device=CUDA)
        for begin in range(0, batch * pages * 64, 2**20):
            slots = torch.arange(begin, min(begin + 2**20, batch * pages * 64), device=CUDA)
            index_quantize(self.cache, slots, torch.randn(len(slots), 128, device=CUDA, dtype=torch.bfloat16))
        self.table = torch.randperm(batch * pages, device=CUDA).int().view(batch, pages)
        self.lengths = torch.full((batch,), keys, device=CUDA, dtype=torch.int32)
        self.q = torch.randn(batch, next_n, heads, 128, device=CUDA).to(torch.float8_e4m3fn)
        self.weights = torch.randn(batch * next_n, heads, device=CUDA)

    def arguments(self):
        return self.q, self.cache, self.weights, self.lengths, self.table

    def logits(self, **options):
        from flashlatte.ops.index_logits import paged_index_logits

        return paged_index_logits(*self.arguments(), **options)


def logits() -> None:
    from dataclasses import replace

    from flashlatte.ops.index_logits import index_logits
    from flashlatte.ops.index_logits.portable import config

    a = torch.randn(8192, 8192, device=CUDA).to(torch.float8_e4m3fn)
    one = torch.ones((), device=CUDA)
    scaled = median_us(lambda: torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True))
    matmul = 2 * 8192**3 / scaled / 1e6
    row("e4m3 matmul 8192", scaled, note=f"{matmul:.0f} TFLOPS")
    variants = [
        {},
        {"block_n": 128, "num_warps": 8},
        {"block_n": 128, "num_warps": 4, "rows": 64},
        {"num_stages": 2},
        {"num_stages": 4},
        {"tiles": 32},
    ]
    for m, n, heads in ((4096, 32768, 64), (4096, 32768, 32)):
        q, k, scale, weights, start, end = prefill(m, n, heads)
        out = torch.empty(m, n, device=CUDA)
        flops = 2 * heads * 128 * float(end.double().sum())
        for variant in variants:
            with mock.patch.dict(config.RAGGED, hopper=replace(config.RAGGED["hopper"], **variant)):
                arguments = {"k_scale": scale, "clean": False, "out": out, "backend": "portable"}
                us = median_us(partial(index_logits, q, k, weights, start, end, **arguments))
            text = " ".join(f"{name}={value}" for name, value in variant.items())
            rate = flops / us / 1e6
            row(f"portable logits {m} x {n} H{heads}", us, note=f"{rate:.0f} TFLOPS, {rate / matmul:.2f} {text}")
    variants = [{}, {"block_n": 128}, {"num_stages": 3}, {"programs": 3}, {"programs": 4}]
    for batch, keys, others in ((64, 32768, 112), (4, 131072, 38), (1, 131072, 14.6)):
        case = Decode(batch, keys)
        out = torch.empty(batch, case.table.shape[1] * 64, device=CUDA)
        for variant in variants:
            with mock.patch.dict(config.PAGED, hopper=replace(config.PAGED["hopper"], **variant)):
                us = median_us(partial(case.logits, clean=False, out=out, backend="portable"))
            text = " ".join(f"{name}={value}" for name, value in variant.items())
            row(f"portable paged logits b {batch} x {keys}", us, others, None, text)


def rest() -> None:
    from flashlatte import kv_cache
    from flashlatte.ops.index_convert import index_convert
    from flashlatte.ops.index_quantize import index_gather, index_quantize
    from flashlatte.ops.index_query import index_query
    from flashlatte.ops.index_select import index_select, paged_index_select

    k = torch.randn(65536, 128, device=CUDA, dtype=torch.bfloat16)
    cache = kv_cache.allocate("index_fp8", 1024, 64, device=CUDA)
    slots = torch.randperm(65536, device=CUDA)
    row("index_quantize 65,536 tokens", median_us(lambda: index_quantize(cache, slots, k)), 24.8, 20)
    table = torch.randperm(1024, device=CUDA).int().view(4, 256)
    cu_seqlens = torch.arange(5, device=CUDA, dtype=torch.int32) * 16384
    values = torch.empty(65536, 128, device=CUDA, dtype=torch.float8_e4m3fn)
    scales = torch.empty(65536, device=CUDA)
    gather = median_us(lambda: index_gather(cache, table, cu_seqlens, 65536, values=values, scales=scales))
    row("index_gather 65,536 tokens", gather)
    q = torch.randn(8192, 64, 128, device=CUDA, dtype=torch.bfloat16)
    weights = torch.randn(8192, 64, device=CUDA)
    cos_sin, positions = torch.randn(8192, 64, device=CUDA), torch.arange(8192, device=CUDA)
    row("index_query 8,192 x 64 x 128", median_us(lambda: index_query(q, weights, cos_sin, positions)), 321)
    hadamard = median_us(lambda: index_query(q, weights, cos_sin, positions, hadamard=True))
    row("index_query 8,192 x 64 x 128 hadamard", hadamard)
    indices = torch.randint(0, 16384, (128, 2048), device=CUDA).int()
    tables = torch.zeros(128, 256, dtype=torch.int32, device=CUDA)
    row("index_convert 128 x 2,048", median_us(lambda: index_convert(indices, tables, 64)))
    row("index_convert 128 x 2,048 compact", median_us(lambda: index_convert(indices, tables, 64, compact=True)))
    for m, n, others, floor in ((4096, 32768, 2259, 2250), (4096, 131072, 9522, 9000)):
        q, k, scale, weights, start, end = prefill(m, n, 64)
        for size in (2**26, 2**28):
            arguments = {"k_scale": scale, "workspace_bytes": size}
            us = median_us(partial(index_select, q, k, weights, start, end, 2048, **arguments))
            row(f"index_select {m} x {n}", us, others, floor, f"workspace {size >> 20} MiB")
    for batch, keys, floor in ((64, 32768, 130), (1, 131072, None), (128, 8192, None)):
        case = Decode(batch, keys)
        out = torch.empty(batch, 2048, dtype=torch.int32, device=CUDA)
        replay = captured(partial(paged_index_select, *case.arguments(), 2048, slots=True, indices=out))
        row(f"index_select b {batch} x {keys} to slots, graph", median_us(replay), None, floor)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--section", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", action="store_true", help="run the sections in this process")
    options = parser.parse_args()
    if options.here:
        for section in options.section:
            globals()[section]()
        return 0
    texts, failed = [], False
    for section in options.section:
        command = [sys.executable, __file__, "--here", "--section", section]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=SECTIONS[section])
            text, code = result.stdout + result.stderr, result.returncode
        except subprocess.TimeoutExpired as error:
            text, code = f"{(error.stdout or b'').decode()}\n{section}: ran out of time", 124
        failed |= code != 0
        tail = text.strip().splitlines()[-1:] if code else []
        texts.append(f"== {section}: {'failed: ' + ' '.join(tail) if code else 'ok'}\n{text}")
        print(texts[-1].splitlines()[0], flush=True)
    whole = "\n".join(texts)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "indexer.txt").write_text(whole)
    print("\n".join(line.removeprefix("ROW ") for line in whole.splitlines() if line.startswith(("ROW", "=="))))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
