"""Times FlashMLA's own Python package and FlashLatte alternately; one JSON line for each case.

    flashlatte bench flashmla --flash-mla FOLDER --flashmla-commit COMMIT [--section dense_decode] [--json FILE]

FOLDER holds the package ``flash_mla`` of a FlashMLA that was built for this PyTorch and GPU; without the option an
installed one is used. FlashMLA's scheduler metadata is computed once, before the timed calls, as an engine computes it
once for all layers of a step; FlashLatte's is part of each call. ``ratio`` is FlashMLA's time / FlashLatte's.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flashlatte.bench import alternate
from flashlatte.bench.peers.command import Groups, groups
from flashlatte.bench.problems import DenseDecode, Problem, SparseDecode, SparsePrefill
from flashlatte.bench.results import append_line
from flashlatte.bench.workloads.base import Results
from flashlatte.bench.workloads.dense_decode import DenseDecodeWorkload
from flashlatte.bench.workloads.sparse_decode import SparseDecodeWorkload
from flashlatte.bench.workloads.sparse_prefill import SparsePrefillWorkload

ROUNDS = 6
LATENT = 512
V32 = functools.partial(SparseDecode, "v32", tokens=32768, page_size=64)
MODEL1 = functools.partial(SparseDecode, "model1", s_q=2, topk=128, tokens=16384, page_size=256, extra_tokens=16384)
DEVICE, GRAPH = "device", "graph"
# Problems, and how they are timed.
DENSE_DECODE = (
    (DenseDecode(128, 2, 128, 4096), DEVICE),
    (DenseDecode(128, 2, 128, 8192, varlen=True, causal=True), DEVICE),
    (DenseDecode(128, 1, 128, 4096), DEVICE),
    (DenseDecode(128, 1, 128, 4096, varlen=True), DEVICE),
    (DenseDecode(128, 1, 128, 32768), DEVICE),
    (DenseDecode(16, 4, 128, 4096, causal=True), DEVICE),
    (DenseDecode(128, 1, 64, 4096), DEVICE),
    (DenseDecode(128, 1, 32, 4096), DEVICE),
    (DenseDecode(128, 1, 16, 4096), DEVICE),
    (DenseDecode(128, 2, 16, 4096, causal=True), DEVICE),
    (DenseDecode(32, 1, 128, 8192), DEVICE),
    (DenseDecode(8, 1, 128, 8192), DEVICE),
    (DenseDecode(1, 1, 16, 131072), DEVICE),
    (DenseDecode(1, 1, 128, 131072), DEVICE),
    (DenseDecode(1, 1, 128, 32768), DEVICE),
    (DenseDecode(1, 1, 128, 4096), DEVICE),
    (DenseDecode(1, 1, 16, 4096), DEVICE),
    (DenseDecode(1, 1, 128, 4096), GRAPH),
    (DenseDecode(1, 1, 16, 4096), GRAPH),
    (DenseDecode(4, 1, 16, 8192), GRAPH),
    (DenseDecode(1, 1, 128, 65536), GRAPH),
    (DenseDecode(128, 2, 128, 8192, dtype="fp16"), DEVICE),
)
SPARSE_DECODE = (
    V32(batch=128, s_q=2, h_q=128, topk=2048),
    V32(batch=64, s_q=2, h_q=128, topk=2048),
    V32(batch=2, s_q=2, h_q=128, topk=2048),
    V32(batch=74, s_q=1, h_q=128, topk=2048),
    MODEL1(batch=128, h_q=128, extra_topk=1024),
    MODEL1(batch=64, h_q=64, extra_topk=512),
    MODEL1(batch=128, h_q=64, extra_topk=512),
    MODEL1(batch=2, h_q=64, extra_topk=512),
    MODEL1(batch=128, h_q=128, extra_topk=1024, extra_page_size=2, extra_varlen=True),
    MODEL1(batch=128, h_q=64, extra_topk=1024, extra_page_size=2, extra_varlen=True),
    V32(batch=32, s_q=2, h_q=128, topk=16384),
    V32(batch=32, s_q=2, h_q=64, topk=16384),
)
SPARSE_PREFILL = (
    *(SparsePrefill(576, 128, 2048, s_kv) for s_kv in (8192, 32768, 131072)),
    *(SparsePrefill(512, h_q, topk, s_kv) for h_q, topk in ((64, 512), (128, 1024)) for s_kv in (8192, 65536)),
)
CASES: dict[str, tuple[tuple[Problem, str], ...]] = {
    "dense_decode": DENSE_DECODE,
    "sparse_decode": tuple((problem, DEVICE) for problem in SPARSE_DECODE),
    "sparse_prefill": tuple((problem, DEVICE) for problem in SPARSE_PREFILL),
}


def load(folder: Path | None) -> ModuleType:
    """FlashMLA's package, from ``folder`` if given.

    Raises:
        ValueError: if it cannot be imported, or is the package that forwards to FlashLatte.
    """
    if folder is not None:
        sys.path.insert(0, str(folder.resolve()))
    try:
        package = importlib.import_module("flash_mla")
    except (ImportError, OSError) as error:
        raise ValueError(f"--flash-mla must name the folder of FlashMLA's package flash_mla: {error}") from error
    if package.flash_mla_with_kvcache.__module__.startswith("flashlatte."):
        raise ValueError(f"flash_mla in {package.__file__} forwards to FlashLatte; --flash-mla must name FlashMLA's")
    return package


def dense_decode(flash_mla: ModuleType, work: DenseDecodeWorkload) -> Callable[[], Results]:
    schedule, _ = flash_mla.get_mla_metadata()

    def run() -> Results:
        out, lse = flash_mla.flash_mla_with_kvcache(
            work.q, work.k_cache, work.block_table, work.cache_seqlens, LATENT, schedule, causal=work.causal
        )
        return {"out": out, "lse": lse}

    return run


def sparse_decode(flash_mla: ModuleType, work: SparseDecodeWorkload) -> Callable[[], Results]:
    schedule, _ = flash_mla.get_mla_metadata()
    options: dict[str, Any] = {"indices": work.main.indices, "attn_sink": work.attn_sink, "is_fp8_kvcache": True}
    if work.extra is not None:
        options["extra_k_cache"] = work.extra.cache
        options["extra_indices_in_kvcache"] = work.extra.indices
        options["extra_topk_length"] = work.extra.lengths

    def run() -> Results:
        out, lse = flash_mla.flash_mla_with_kvcache(work.q, work.main.cache, None, None, LATENT, schedule, **options)
        return {"out": out, "lse": lse}

    return run


def sparse_prefill(flash_mla: ModuleType, work: SparsePrefillWorkload) -> Callable[[], Results]:
    scale = work.q.shape[-1] ** -0.5

    def run() -> Results:
        results = flash_mla.flash_mla_sparse_fwd(work.q, work.kv, work.indices, scale, LATENT, work.attn_sink)
        return dict(zip(("out", "max_logits", "lse"), results, strict=True))

    return run


CALLS: dict[str, Callable[[ModuleType, Any], Callable[[], Results]]] = {
    "dense_decode": dense_decode,
    "sparse_decode": sparse_decode,
    "sparse_prefill": sparse_prefill,
}


def calls_of(operation: str, flash_mla: ModuleType, device: torch.device) -> Groups:
    """FlashLatte's call and FlashMLA's, for each case of the operation."""
    peers = {"flashmla": functools.partial(CALLS[operation], flash_mla)}
    for problem, method in CASES[operation]:
        yield from groups([problem], device, peers, method)


def merged(lines: Iterable[dict[str, Any]], flashmla_commit: str) -> Iterator[dict[str, Any]]:
    """One line of FlashLatte's and FlashMLA's of the same case; none where the results of one were wrong."""
    for _, same in itertools.groupby(lines, key=lambda line: (line["op"], line["case"], line["method"])):
        pair = list(same)
        if len(pair) != 2:
            continue
        ours, theirs = pair
        line = {name: ours[name] for name in ("op", "case", "method")}
        line |= {"flashmla_us": round(theirs["us"], 1), "flashlatte_us": round(ours["us"], 1)}
        line |= {"ratio": round(theirs["us"] / ours["us"], 3), "backend": ours["backend"]}
        shares = ("share_of_matmul", "share_of_copy", "matmul_tflops", "copy_gbps")
        line |= {name: ours[name] for name in (*shares, "device", "torch", "triton") if name in ours}
        line |= {"flashmla_commit": flashmla_commit, "commit": ours["commit"], "date": ours["date"][:10]}
        yield line | ({"scaled_down": True} if ours["scaled_down"] else {})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    alternate.add_arguments(parser, CASES)
    parser.set_defaults(rounds=ROUNDS)
    parser.add_argument("--flash-mla", type=Path, metavar="FOLDER", help="folder of the package flash_mla")
    parser.add_argument("--flashmla-commit", required=True, metavar="COMMIT", help="FlashMLA's commit, for the lines")


def run(options: argparse.Namespace) -> int:
    flash_mla = load(options.flash_mla)
    device, ceilings = alternate.begin()
    wrong: list[str] = []
    for name in options.section or CASES:
        lines = alternate.lines(calls_of(name, flash_mla, device), device, ceilings, wrong, options.rounds)
        for line in merged(lines, options.flashmla_commit):
            case, times = " ".join(line[name] for name in ("op", "case", "method")), ("flashmla_us", "flashlatte_us")
            print(f"{case:<72}{''.join(f'{line[name]:>9.1f}' for name in times)} µs {line['ratio']:.3f}", flush=True)
            append_line(options.json, line)
    return alternate.end(wrong)
