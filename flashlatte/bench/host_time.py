"""Host time of warm calls: the time that Python takes for a call whose shape was called before.

    flashlatte bench host-time [--batches 80] [--calls 50] [--json FILE]

Each operation is timed alone and under ``torch.set_default_device("cuda")``, a torch-function mode, and compared with
``x.add_(1)``, a single PyTorch kernel. If FlashMLA is installed as ``flash_mla``, its ``flash_mla_with_kvcache`` is
timed with the same tensors. The benchmark waits for the GPU between batches of calls, so that the launch queue is never
full.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import flashlatte
from flashlatte import flash_mla
from flashlatte.bench import environment
from flashlatte.bench.alternate import add_json_option
from flashlatte.bench.results import append_line

PLAIN, MODE = "plain", "set_default_device"


def calls(device: torch.device) -> dict[str, Callable[[], object]]:
    """A call of each operation, of a decode step with few requests."""

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(torch.bfloat16)

    x = torch.zeros(1024, device=device)
    q, k_cache = rows(1, 1, 128, 576), rows(64, 64, 1, 576)
    block_table = torch.arange(64, dtype=torch.int32, device=device).view(1, 64)
    lengths = torch.tensor([1000], dtype=torch.int32, device=device)
    packed = flashlatte.kv_cache.allocate("v32", 64, 64, device=device)
    packed.zero_()
    selected = torch.arange(2048, dtype=torch.int32, device=device).view(1, 1, 2048)
    outs, lses = [rows(1, 128, 512) for _ in range(2)], [torch.zeros(1, 128, device=device) for _ in range(2)]
    slots, latents, rope = torch.arange(1, device=device), rows(1, 512), rows(1, 64)
    indices, extra_indices = (
        torch.arange(count, dtype=torch.int32, device=device).repeat(2, 2, 1) for count in (128, 512)
    )
    queries, sink = rows(2, 2, 64, 512), torch.zeros(64, device=device)
    window, compressed = (flashlatte.kv_cache.allocate("model1", 8, size, device=device) for size in (256, 64))

    def dense(library: Any, heads: int) -> Callable[[], object]:
        schedule, given = library.get_mla_metadata()[0], q[:, :, :heads].contiguous()
        return lambda: library.flash_mla_with_kvcache(given, k_cache, block_table, lengths, 512, schedule)

    def sparse(library: Any) -> Callable[[], object]:
        schedule = library.get_mla_metadata()[0]
        return lambda: library.flash_mla_with_kvcache(
            queries,
            window,
            None,
            None,
            512,
            schedule,
            is_fp8_kvcache=True,
            indices=indices,
            attn_sink=sink,
            extra_k_cache=compressed,
            extra_indices_in_kvcache=extra_indices,
        )

    libraries: dict[str, Any] = {"FlashLatte": flash_mla}
    if importlib.util.find_spec("flash_mla") is not None:
        libraries["FlashMLA"] = importlib.import_module("flash_mla")
    drop_ins = {
        f"flash_mla_with_kvcache, {kind}, {name}": call(library)
        for kind, call in (
            ("h 128", lambda library: dense(library, 128)),
            ("h 16", lambda library: dense(library, 16)),
            ("sparse", sparse),
        )
        for name, library in libraries.items()
    }
    return {
        "x.add_(1)": lambda: x.add_(1),
        **drop_ins,
        "dense_decode": lambda: flashlatte.dense_decode(q, k_cache, block_table, lengths),
        "sparse_decode": lambda: flashlatte.sparse_decode(q, packed, selected),
        "merge_states": lambda: flashlatte.merge_states(outs, lses),
        "cache_write": lambda: flashlatte.kv_cache.write(packed, slots, latents, rope=rope),
    }


def host_time(call: Callable[[], object], batches: int, calls_a_batch: int) -> float:
    """Median over batches of the microseconds that a call takes."""
    for _ in range(calls_a_batch):
        call()
    taken = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls_a_batch):
            call()
        taken.append((time.perf_counter() - start) / calls_a_batch * 1e6)
    torch.cuda.synchronize()
    return statistics.median(taken)


def measure(batches: int, calls_a_batch: int) -> dict[str, dict[str, float]]:
    """Microseconds of each operation, plainly and under the mode, timed alternately."""
    timed = calls(torch.device("cuda", torch.cuda.current_device()))
    found: dict[str, dict[str, list[float]]] = {name: {PLAIN: [], MODE: []} for name in timed}
    for _ in range(4):
        for device, label in ((None, PLAIN), ("cuda", MODE)):
            torch.set_default_device(device)
            for name, call in timed.items():
                found[name][label].append(host_time(call, batches // 4, calls_a_batch))
    torch.set_default_device(None)
    return {name: {label: min(times) for label, times in by.items()} for name, by in found.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, default=80, help="batches of calls that are timed (default 80)")
    parser.add_argument("--calls", type=int, default=50, help="calls of a batch (default 50)")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    if options.batches < 4 or options.calls < 1:
        raise ValueError("--batches must be at least 4 and --calls at least 1")
    environment.check_gpu()
    about = dataclasses.asdict(environment.describe(torch.device("cuda")))
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {Path(flashlatte.__file__).parent}")
    print(f"{'µs':44}{PLAIN:>10}{MODE:>22}")
    for name, by in measure(options.batches, options.calls).items():
        print(f"{name:44}{by[PLAIN]:10.1f}{by[MODE]:22.1f}")
        append_line(options.json, {"op": "host_time", "call": name, "us": by} | about)
    return 0
