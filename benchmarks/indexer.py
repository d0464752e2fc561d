"""Check the sparse-attention indexer's portable kernels on a GPU, and time them.

    python benchmarks/indexer.py [--section NAME ...] [--out DIRECTORY]

Each section runs in a process of its own with a time limit. A table comes last; the directory gets the whole output.
Beside our times stand the best of others' on one H100 and the floor that was set.
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
SECTIONS = {"check": 220, "topk": 150, "logits": 120, "rest": 90, "final": 110}


def median_us(call) -> float:
    from triton import testing

    return testing.do_bench(call, warmup=10, rep=60, return_mode="median") * 1e3


def row(name: str, us: float, others: float | None = None, floor: float | None = None, note: str = "") -> None:
    parts = [f"ROW {name:<44}{us:>9.1f} µs"]
    parts += [f"others {others:g}" if others else "", f"floor {floor:g}" if floor else "", note]
    print("  ".join(part for part in parts if part), flush=True)


def rows_of(kind: str, rows: int, width: int) -> torch.Tensor:
    x = torch.randn(rows, width, device=CUDA)
    if kind == "equal":
        return torch.full_like(x, 0.25)
    if kind == "one bin":
        return (0x3F800000 + torch.randint(0, 2**23, x.shape, device=CUDA)).int().view(torch.float32)
    if kind == "concentrated":
        return 7.0 * (1 + 1e-3 * x.sigmoid())
    if kind == "subnormal":
        return torch.randint(0, 2**22, x.shape, device=CUDA).int().view(torch.float32) * x.sign()
    if kind == "zeros":
        return torch.where(x > 0, 0.0, -0.0)
    if kind == "sorted":
        return x.sort(dim=1).values
    if kind == "reversed":
        return x.sort(dim=1, descending=True).values
    if kind == "mostly zero":
        return x.masked_fill(x < 1.5, 0.0)
    if kind == "nan":
        return x.masked_fill(x > 1.0, torch.nan)
    return x


KINDS = ("normal", "equal", "one bin", "concentrated", "subnormal", "zeros", "sorted", "reversed", "mostly zero", "nan")


def check() -> None:
    check_topk()
    check_writes()
    check_logits()
    check_select()


def check_topk() -> None:
    from flashlatte.ops.topk import topk

    for kind in KINDS:
        for rows, width, k in (
            (3, 131072, 2048),
            (150, 20000, 2048),
            (300, 5000, 512),
            (2, 2**20, 4096),
            (40, 9000, 1),
        ):
            x = rows_of(kind, rows, width)
            end = torch.randint(0, width + 5, (rows,), device=CUDA)
            end[0] = width
            expected = topk(x, k, end=end, return_values=True, backend="reference")
            actual = topk(x, k, end=end, return_values=True, backend="portable")
            again = topk(x, k, end=end, backend="portable")
            assert actual[0].equal(expected[0]), f"topk of {kind} rows {rows} x {width}, k {k}"
            assert actual[1].nan_to_num(7.0).equal(expected[1].nan_to_num(7.0)), f"topk values of {kind}"
            assert again.equal(actual[0]), f"topk of {kind} rows differs from run to run"
    x = rows_of("normal", 4, 50000).bfloat16()
    assert topk(x, 512).equal(topk(x, 512, backend="reference")), "topk of bf16"
    x, end = rows_of("normal", 64, 40000), torch.full((64,), 40000, device=CUDA, dtype=torch.int32)
    indices = torch.empty(64, 2048, dtype=torch.int32, device=CUDA)
    replay = captured(lambda: topk(x, 2048, end=end, indices=indices))
    for length in (40000, 3, 2048, 2049, 9000, 0, 40000):
        end.fill_(length)
        x.normal_()
        replay()
        assert indices.equal(topk(x, 2048, end=end, backend="reference")), f"topk graph at length {length}"
    print("topk checked")


def captured(call):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def check_writes() -> None:
    from flashlatte import kv_cache
    from flashlatte.ops.index_convert import index_convert
    from flashlatte.ops.index_quantize import index_gather, index_quantize
    from flashlatte.ops.index_query import index_query

    for name in ("index_fp8", "index_bf16", "index_mxfp4"):
        for dtype in (torch.bfloat16, torch.float32):
            for rounding in ("exact", "power_of_two"):
                k = torch.randn(1000, 128, device=CUDA).to(dtype) * torch.rand(1000, 1, device=CUDA).to(dtype)
                slots = torch.randperm(30 * 64, device=CUDA)[:1000]
                slots[::7] = -1
                caches = [kv_cache.allocate(name, 30, 64, device=CUDA) for _ in range(2)]
                for cache, backend in zip(caches, ("portable", "reference"), strict=True):
                    index_quantize(cache, slots, k, scale_rounding=rounding, backend=backend)
                assert caches[0].equal(caches[1]), f"index_quantize {name} {dtype} {rounding}"
        table = torch.randperm(30, device=CUDA)[:28].view(4, 7).int()
        cu_seqlens = torch.tensor([0, 400, 400, 423, 800], device=CUDA, dtype=torch.int32)
        gathered = [index_gather(caches[0], table, cu_seqlens, 810, backend=b) for b in ("portable", "reference")]
        for ours, expected in zip(*gathered, strict=True):
            assert ours is None or ours.view(torch.uint8).equal(expected.view(torch.uint8)), f"index_gather {name}"
    q = torch.randn(70, 64, 128, device=CUDA).bfloat16()
    weights = torch.randn(70, 64, device=CUDA)
    angles = torch.rand(100, 32, device=CUDA) * 6
    cos_sin, positions = torch.cat((angles.cos(), angles.sin()), dim=1), torch.arange(70, device=CUDA)
    for options in ({}, {"hadamard": True}, {"rope_first": False, "interleaved": True, "smallest_amax": 1e-4}):
        (ours, folded), (expected, expected_folded) = (
            index_query(q, weights, cos_sin, positions, backend=b, **options) for b in ("portable", "reference")
        )
        torch.testing.assert_close(folded, expected_folded, rtol=2e-2 if options.get("hadamard") else 1e-5, atol=0)
        different = (ours.view(torch.uint8) != expected.view(torch.uint8)).float().mean()
        assert different < (0.2 if options.get("hadamard") else 1e-3), f"index_query {options}: {different:.4f} differ"
    indices = torch.randint(-5, 7 * 64 + 9, (8, 2048), device=CUDA).int()
    queries = torch.arange(8, device=CUDA) * 50
    arguments = {"next_n": 2, "query_positions": queries, "sinks": 4, "window": 60, "compact": True}
    for dtype in (torch.int32, torch.int64):
        ours = index_convert(indices, table, 64, dtype=dtype, backend="portable", **arguments)
        assert ours.equal(index_convert(indices, table, 64, dtype=dtype, backend="reference", **arguments)), "convert"
    print("writes checked")


def check_logits() -> None:
    from flashlatte import kv_cache
    from flashlatte.kv_cache.fp4 import quantize_mxfp4
    from flashlatte.kv_cache.index_formats import quantize_rows
    from flashlatte.ops.index_logits import index_logits, paged_index_logits
    from flashlatte.ops.index_quantize import index_quantize

    def close(ours, expected, name):
        assert ours.isneginf().equal(expected.isneginf()), f"{name}: -inf elsewhere"
        seen = ~expected.isneginf()
        ours, expected = ours[seen].double(), expected[seen].double()
        difference = float(1 - 2 * (ours * expected).sum() / (ours.square().sum() + expected.square().sum()))
        assert difference < 5e-6, f"{name}: difference {difference:.2e}"

    torch.backends.cuda.matmul.allow_tf32 = False
    for m, n, heads in ((130, 1000, 64), (37, 4097, 32), (65, 700, 20), (9, 300, 128), (50, 513, 8)):
        x, weights = torch.randn(n, 128, device=CUDA), torch.randn(m, heads, device=CUDA)
        start = torch.randint(-3, n, (m,), device=CUDA)
        end = torch.randint(0, n + 9, (m,), device=CUDA)
        q = torch.randn(m, heads, 128, device=CUDA)
        keys = {"e4m3": quantize_rows(x, "exact"), "bf16": (x.bfloat16(), None), "mxfp4": quantize_mxfp4(x)}
        for kind, (k, scale) in keys.items():
            for dtype in (torch.float8_e4m3fn, torch.bfloat16):
                ours, expected = (
                    index_logits(q.to(dtype), k, weights, start, end, k_scale=scale, backend=b)
                    for b in ("portable", "reference")
                )
                close(ours, expected, f"ragged {m} x {n} H{heads} {kind} keys {dtype} queries")
        ours, expected = (index_logits(q, x, weights, start, end, backend=b) for b in ("portable", "reference"))
        close(ours, expected, f"ragged {m} x {n} H{heads} float32")
    for name in ("index_fp8", "index_bf16", "index_mxfp4"):
        for requests, next_n, heads, page_size in ((5, 1, 64, 64), (130, 2, 32, 64), (3, 3, 64, 48), (2, 1, 20, 1)):
            pages_each = -(-900 // page_size)
            cache = kv_cache.allocate(name, requests * pages_each, page_size, device=CUDA)
            slots = cache.shape[0] * page_size
            index_quantize(cache, torch.arange(slots, device=CUDA), torch.randn(slots, 128, device=CUDA))
            table = torch.randperm(requests * pages_each, device=CUDA).int().view(requests, pages_each)
            lengths = torch.randint(0, 900, (requests,), device=CUDA)
            lengths[0] = 900
            table[-1, -1] = 2**30
            q = torch.randn(requests, next_n, heads, 128, device=CUDA)
            weights = torch.randn(requests * next_n, heads, device=CUDA)
            for dtype in (torch.float8_e4m3fn, torch.bfloat16):
                for lens in (lengths, lengths.unsqueeze(1) - torch.arange(next_n, device=CUDA)):
                    ours, expected = (
                        paged_index_logits(q.to(dtype), cache, weights, lens, table, backend=b)
                        for b in ("portable", "reference")
                    )
                    close(ours, expected, f"paged {name} b{requests} next_n {next_n} H{heads} page {page_size} {dtype}")
    print("logits checked")


def check_select() -> None:
    from flashlatte.ops.index_select import index_select, paged_index_select

    case = Decode(16, 20000)
    for slots in (False, True):
        ours = paged_index_select(*case.arguments(), 2048, slots=slots)
        logits = case.logits()
        chosen = logits.gather(1, paged_index_select(*case.arguments(), 2048).long()).sort(dim=1).values
        expected = logits.topk(2048, dim=1).values.sort(dim=1).values
        assert ours.shape == (16, 2048)
        torch.testing.assert_close(chosen, expected, rtol=0, atol=0)
    q, k, scale, weights, start, end = prefill(300, 5000, 64)
    small, large = (
        index_select(q, k, weights, start, end, 512, k_scale=scale, workspace_bytes=size) for size in (2**20, 2**28)
    )
    assert small.equal(large)
    print("select checked")


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


def topk() -> None:
    from flashlatte.ops.topk import topk

    cases = {
        (4096, 32768, 2048): (291, 330),
        (64, 131072, 2048): (46.6, 48),
        (64, 32768, 2048): (17.9, 19),
        (1, 131072, 2048): (12.5, 16),
        (1, 32768, 2048): (15.4, 14),
        (4096, 8192, 2048): (97.8, None),
        (4096, 32768, 512): (251, None),
        (128, 8192, 2048): (10.4, None),
        (4096, 131072, 2048): (976, 1050),
    }
    for (rows, width, k), (others, floor) in cases.items():
        x = torch.randn(rows, width, device=CUDA)
        out = torch.empty(rows, k, dtype=torch.int32, device=CUDA)
        row(f"topk {rows} x {width} k {k}", median_us(partial(topk, x, k, indices=out)), others, floor)
        del x
    for kind in ("concentrated", "equal", "mostly zero"):
        for rows, width in ((64, 32768), (4096, 32768)):
            x = rows_of(kind, rows, width)
            out = torch.empty(rows, 2048, dtype=torch.int32, device=CUDA)
            row(f"topk {rows} x {width} {kind}", median_us(partial(topk, x, 2048, indices=out)))


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


def final() -> None:
    """What was changed last, checked and timed in a minute."""
    from dataclasses import replace

    from flashlatte import kv_cache
    from flashlatte.ops.index_convert import index_convert
    from flashlatte.ops.index_quantize import index_gather, index_quantize
    from flashlatte.ops.index_query import index_query
    from flashlatte.ops.index_select import index_select, paged_index_select
    from flashlatte.ops.topk import topk
    from flashlatte.ops.topk.portable import launch
    from flashlatte.runtime import repeat

    x = torch.randn(4096, 32768, device=CUDA)
    some = torch.arange(0, 4096, 97, device=CUDA)
    expected = topk(x[some], 2048, backend="reference")
    out = torch.empty(4096, 2048, dtype=torch.int32, device=CUDA)
    variants = (
        {},
        {"finish_entries": 16},
        {"filter_entries": 32},
        {"filter_warps": 8},
        {"places_per_k": 4, "fill": 0.5},
    )
    for variant in variants:
        repeat.forget()
        with mock.patch.object(launch, "MANY_ROWS", replace(launch.MANY_ROWS, **variant)):
            us = median_us(partial(topk, x, 2048, indices=out))
        assert out[some].equal(expected), f"topk {variant}"
        row("topk 4096 x 32768", us, 291, 330, " ".join(f"{name}={value}" for name, value in variant.items()))
    repeat.forget()
    for rows, width, others, floor in (
        (64, 131072, 46.6, 48),
        (64, 32768, 17.9, 19),
        (1, 131072, 12.5, 16),
        (1, 32768, 15.4, 14),
    ):
        x = torch.randn(rows, width, device=CUDA)
        out = torch.empty(rows, 2048, dtype=torch.int32, device=CUDA)
        variants = ({}, {"finish_entries": 8}) if width == 131072 else ({},)
        for variant in variants:
            repeat.forget()
            with mock.patch.object(launch, "FEW_ROWS", replace(launch.FEW_ROWS, **variant)):
                us = median_us(partial(topk, x, 2048, indices=out))
            assert out.equal(topk(x, 2048, backend="reference")), f"topk {rows} x {width} {variant}"
            row(f"topk {rows} x {width}", us, others, floor, " ".join(f"{n}={v}" for n, v in variant.items()))
    repeat.forget()
    k = torch.randn(65536, 128, device=CUDA, dtype=torch.bfloat16)
    cache, other = (kv_cache.allocate("index_fp8", 1024, 64, device=CUDA) for _ in range(2))
    slots = torch.randperm(65536, device=CUDA)
    row("index_quantize 65,536 tokens", median_us(partial(index_quantize, cache, slots, k)), 24.8, 20)
    index_quantize(other, slots, k, backend="reference")
    assert cache.equal(other), "index_quantize"
    table = torch.randperm(1024, device=CUDA).int().view(4, 256)
    cu_seqlens = torch.arange(5, device=CUDA, dtype=torch.int32) * 16384
    values = torch.empty(65536, 128, device=CUDA, dtype=torch.float8_e4m3fn)
    scales = torch.empty(65536, device=CUDA)
    gather = partial(index_gather, cache, table, cu_seqlens, 65536, values=values, scales=scales)
    row("index_gather 65,536 tokens", median_us(gather))
    reference = index_gather(cache, table, cu_seqlens, 65536, backend="reference")[0]
    assert values.view(torch.uint8).equal(reference.view(torch.uint8)), "index_gather"
    q, weights = torch.randn(8192, 64, 128, device=CUDA, dtype=torch.bfloat16), torch.randn(8192, 64, device=CUDA)
    cos_sin, positions = torch.randn(8192, 64, device=CUDA), torch.arange(8192, device=CUDA)
    for hadamard in (False, True):
        us = median_us(partial(index_query, q, weights, cos_sin, positions, hadamard=hadamard))
        row("index_query 8,192 x 64 x 128", us, 321, None, f"hadamard={hadamard}")
    indices = torch.randint(0, 16384, (128, 2048), device=CUDA).int()
    tables = torch.zeros(128, 256, dtype=torch.int32, device=CUDA)
    row("index_convert 128 x 2,048", median_us(partial(index_convert, indices, tables, 64)))
    q, k, scale, weights, start, end = prefill(4096, 32768, 64)
    us = median_us(partial(index_select, q, k, weights, start, end, 2048, k_scale=scale))
    row("index_select 4096 x 32768", us, 2259, 2250)
    case = Decode(64, 32768)
    out = torch.empty(64, 2048, dtype=torch.int32, device=CUDA)
    replay = captured(partial(paged_index_select, *case.arguments(), 2048, slots=True, indices=out))
    row("index_select b 64 x 32768 to slots, graph", median_us(replay), None, 130)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--section", nargs="*", choices=list(SECTIONS), default=list(SECTIONS)[:-1])
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
