"""Times the kernels of FlashMLA, FlashAttention-3 and FlashLatte alternately; also PyTorch's attention over images.

    VLLM_KERNELS=FOLDER flashlatte bench peers [--section decode] [--json FILE]

FOLDER is that of an installed vLLM for CUDA (0.26, for PyTorch 2.11); only its compiled extensions are loaded. Sections
``cost_growth`` (FlashLatte alone without VLLM_KERNELS) and ``vision`` need none.

A peer's scheduler metadata is computed once, as vLLM computes it once for all layers of a step; FlashLatte's is part of
each call. FlashMLA over e4m3 takes queries in e4m3 and multiplies in e4m3; ``error`` in these lines is
‖out − reference‖ / ‖reference‖, where the reference has the queries in bf16.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from flashlatte.bench import alternate
from flashlatte.bench.alternate import TimedCall
from flashlatte.bench.peers import kernels
from flashlatte.bench.peers.vision import vision
from flashlatte.bench.problems import DenseDecode, DensePrefill, Problem, SparseDecode, SparsePrefill
from flashlatte.bench.workloads import prepare
from flashlatte.bench.workloads.base import Results, Workload, compare
from flashlatte.testing.compare import Tolerance

# A loose check that both compute the same, because e4m3 queries and probabilities are coarse. Over 131,072 keys of
# equal weights FlashMLA's result has a cosine difference of 0.020 from the exact one (docs/notes/dense-decode-fp8.md).
IN_E4M3 = Tolerance(1.0, 1.0, 3e-2)
# Requests, query tokens, heads, keys.
DECODE = (
    (128, 1, 128, 4096),
    (128, 2, 128, 4096),
    (128, 1, 16, 4096),
    (32, 1, 128, 8192),
    (32, 1, 16, 32768),
    (8, 1, 128, 8192),
    (4, 1, 16, 8192),
    (1, 1, 128, 4096),
    (1, 1, 16, 4096),
    (1, 1, 128, 131072),
    (1, 1, 16, 131072),
)
# Further shapes of the e4m3 kernels.
LONG_E4M3 = ((128, 1, 128, 32768), (128, 2, 128, 32768))
# Further cases that docs/notes/floors.md compares with FlashMLA.
FLOORS = (
    DenseDecode(16, 4, 128, 4096, causal=True),
    DenseDecode(128, 1, 128, 4096, varlen=True),
    DenseDecode(128, 2, 128, 8192, varlen=True, causal=True),
    DenseDecode(128, 2, 128, 8192, dtype="fp16"),
    DenseDecode(128, 1, 64, 4096),
    DenseDecode(1, 1, 128, 65536),
    DenseDecode(4, 4, 16, 45118, uneven=(4641, 1730, 1696)),
)


GROWTH_HEADS, GROWTH_BATCHES = (8, 16, 64, 128), (1, 4, 16, 64, 128, 512)
GROWTH_KEYS = tuple(2**power for power in range(10, 21))
# Keys of all requests together: 19 GB of cache.
MAX_GROWTH_KEYS = 2**24
Groups = Iterator[list[TimedCall]]
# By name: maps a workload to a function without arguments.
Peers = dict[str, Callable[[Any], Callable[[], Results]]]


def loaded(device: torch.device, peers: Peers, *, required: bool = True) -> Peers:
    """The peers, or none on a machine that cannot run them. ``required``: refuse a GPU run without peers."""
    return peers if kernels.load(device, required=required) else {}


def groups(
    problems: Iterable[Problem],
    device: torch.device,
    peers: Peers,
    method: str = "device",
    *,
    exact: bool = True,
    precision: str | None = None,
) -> Groups:
    """A group for each problem: FlashLatte, and each peer.

    ``exact``: check a peer's results with the workload's tolerances. ``precision``: also time FlashLatte with this
    precision.
    """
    backend = alternate.backend_on("hopper", device)
    for sized in dict.fromkeys(problem if device.type == "cuda" else problem.scaled_down() for problem in problems):
        workload = prepare(sized, device)
        calls = {"hopper": functools.partial(workload.run, backend)}
        if precision is not None:
            calls[f"hopper_{precision}"] = functools.partial(workload.run, backend, {"precision": precision})
        calls |= {name: peer(workload) for name, peer in peers.items()}
        yield [_timed(workload, sized.name, backend, run, method, exact) for backend, run in calls.items()]


def _timed(
    workload: Workload, name: str, backend: str, run: Callable[[], Results], method: str, exact: bool
) -> TimedCall:
    def check_in_e4m3(results: Results) -> None:
        compare(workload.compared(results), workload.expected, {"out": IN_E4M3})

    more, check = {}, workload.check
    if not exact:
        more["error"] = float(f"{error(workload, run()):.2e}")
        if backend != "hopper":
            check = check_in_e4m3
    operation, moved, flops = workload.call.operation, workload.bytes_moved, workload.flops
    return TimedCall(operation, name, lambda _: run(), check, moved, flops, method, backend, more)


def error(workload: Workload, results: Results) -> float:
    got, want = workload.compared(results)["out"].double(), workload.expected["out"].double()
    return float((got - want).norm() / want.norm())


def decode(device: torch.device) -> Groups:
    """bf16 caches: FlashMLA, and FlashAttention-3 with latent values and rotated keys as separate operands."""
    return dense(device, [DenseDecode(*shape, causal=shape[1] > 1) for shape in DECODE])


def decode_floors(device: torch.device) -> Groups:
    return dense(device, FLOORS)


def dense(device: torch.device, problems: Iterable[DenseDecode]) -> Groups:
    peers = {"flashmla": kernels.flashmla_decode, "flash_attention_3": kernels.fa3_decode}
    return groups(problems, device, loaded(device, peers), "graph")


def decode_e4m3(device: torch.device) -> Groups:
    shapes = (*DECODE, *LONG_E4M3)
    problems = [DenseDecode(*shape, causal=shape[1] > 1, cache_format="fp8") for shape in shapes]
    peers = loaded(device, {"flashmla": kernels.flashmla_e4m3})
    return groups(problems, device, peers, "graph", exact=False, precision="fp8")


def cost_growth(device: torch.device) -> Groups:
    """Dense decode by requests, keys and heads, in graphs of ten calls over requests of equal length."""
    sizes = itertools.product(GROWTH_HEADS, GROWTH_BATCHES, GROWTH_KEYS)
    problems = (DenseDecode(batch, 1, h_q, keys) for h_q, batch, keys in sizes if batch * keys <= MAX_GROWTH_KEYS)
    peers = loaded(device, {"flashmla": kernels.flashmla_decode}, required=False)
    return groups(problems, device, peers, "graph")


def sparse_decode(device: torch.device) -> Groups:
    problems = [SparseDecode("v32", b, 2, h, 2048, 32768, 64) for b, h in ((128, 128), (64, 128), (2, 128), (64, 64))]
    problems += [SparseDecode("model1", b, 2, 64, 128, 16384, 256, 512, 16384, 64) for b in (128, 64, 2)]
    return groups(problems, device, loaded(device, {"flashmla": kernels.flashmla_sparse}))


def sparse_prefill(device: torch.device) -> Groups:
    shapes = ((576, 128, 2048, 8192), (576, 128, 2048, 32768), (576, 128, 2048, 131072), (512, 64, 512, 65536))
    peers = loaded(device, {"flashmla": kernels.flashmla_prefill})
    return groups((SparsePrefill(*shape) for shape in shapes), device, peers)


def dense_prefill(device: torch.device) -> Groups:
    shapes = ((1, 128, 8192), (1, 16, 8192), (1, 16, 32768), (16, 16, 2048), (64, 16, 512))
    problems = [DensePrefill(192, *shape, causal=True) for shape in shapes]
    return groups(problems, device, loaded(device, {"flash_attention_3": kernels.fa3_prefill}))


SECTIONS: alternate.Sections = {
    "decode": decode,
    "decode_floors": decode_floors,
    "decode_e4m3": decode_e4m3,
    "cost_growth": cost_growth,
    "dense_prefill": dense_prefill,
    "sparse_decode": sparse_decode,
    "sparse_prefill": sparse_prefill,
    "vision": vision,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    alternate.add_arguments(parser, SECTIONS)


def run(options: argparse.Namespace) -> int:
    return alternate.run(options, SECTIONS)
