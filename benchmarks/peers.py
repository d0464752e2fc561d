"""Time FlashMLA's and FlashAttention-3's kernels, as a vLLM for CUDA brings them, beside FlashLatte's, in turns.

PYTHONPATH=. python benchmarks/peers.py [--json FILE], with VLLM_KERNELS the folder of an installed vLLM (0.26, for
PyTorch 2.11), of which only the compiled extensions are loaded.

A peer's plan of a call (its scheduler's metadata) is made once, as vLLM makes it once for all layers of a step;
FlashLatte's is a part of each call. FlashMLA over e4m3 takes queries in e4m3, and multiplies in e4m3; ``error`` of
these lines is ‖out − reference‖ / ‖reference‖, where the reference has the queries in bf16.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import checked
import torch

from flashlatte.bench.problems import DenseDecode, DensePrefill, SparseDecode, SparsePrefill
from flashlatte.bench.workloads import prepare
from flashlatte.bench.workloads.base import Results, Workload
from flashlatte.bench.workloads.dense_decode import DenseDecodeWorkload
from flashlatte.bench.workloads.dense_prefill import DensePrefillWorkload
from flashlatte.bench.workloads.sparse_decode import SparseDecodeWorkload
from flashlatte.bench.workloads.sparse_prefill import SparsePrefillWorkload
from flashlatte.testing.compare import Tolerance

EXTENSIONS = ("_flashmla_C.abi3.so", "_flashmla_extension_C.abi3.so", "vllm_flash_attn/_vllm_fa3_C.abi3.so")
LATENT, LARGEST_E4M3 = 512, 448.0
# What vLLM lets FlashAttention-3 split a request into in a CUDA graph.
SPLITS = 32
# What e4m3 queries and probabilities leave of a result; whether it is the same computation is all that this tells.
IN_E4M3 = Tolerance(1.0, 1.0, 5e-3)
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
# What else docs/notes/floors.md sets beside FlashMLA.
FLOORS = (
    DenseDecode(16, 4, 128, 4096, causal=True),
    DenseDecode(128, 1, 128, 4096, varlen=True),
    DenseDecode(128, 2, 128, 8192, varlen=True, causal=True),
    DenseDecode(128, 2, 128, 8192, dtype="fp16"),
    DenseDecode(128, 1, 64, 4096),
    DenseDecode(1, 1, 128, 65536),
    DenseDecode(4, 4, 16, 45118, uneven=(4641, 1730, 1696)),
)


def load(device: torch.device) -> bool:
    """Whether there are peers: only on a GPU."""
    if device.type != "cuda":
        return False
    folder = os.environ.get("VLLM_KERNELS")
    if not folder:
        raise SystemExit("VLLM_KERNELS must name the folder of an installed vLLM")
    for name in EXTENSIONS:
        torch.ops.load_library(str(Path(folder) / name))
    return True


def beside(
    workload: Workload, name: str, peers: dict[str, object], method: str = "device", exact: bool = True
) -> list[checked.Case]:
    """The workload by FlashLatte and by its peers, functions that take nothing."""
    operation, cases = workload.call.operation, []
    calls = {"hopper": lambda: workload.run("hopper" if workload.call.device.type == "cuda" else "reference"), **peers}
    for backend, run in calls.items():
        more: dict[str, object] = {}
        check = workload.check
        if not exact:
            more["error"] = float(f"{error(workload, run()):.2e}")
            if backend != "hopper":
                check = checked.against(lambda: workload.expected, {"out": IN_E4M3}, workload.compared)
        flops, moved = workload.flops, workload.bytes_moved
        cases.append(
            checked.Case(operation, name, lambda _, run=run: run(), check, moved, flops, method, backend, more)
        )
    return cases


def error(workload: Workload, results: Results) -> float:
    got, want = workload.compared(results)["out"].double(), workload.expected["out"].double()
    return float((got - want).norm() / want.norm())


def decode(device: torch.device) -> Iterator[list[checked.Case]]:
    """bf16 caches: FlashMLA, and FlashAttention-3 with its latent values beside the rotated keys."""
    return decode_of((DenseDecode(*shape, causal=shape[1] > 1) for shape in DECODE), device)


def decode_floors(device: torch.device) -> Iterator[list[checked.Case]]:
    return decode_of(FLOORS, device)


def decode_of(problems: Iterable[DenseDecode], device: torch.device) -> Iterator[list[checked.Case]]:
    there = load(device)
    for problem in (sized(problem, device) for problem in problems):
        work = prepare(problem, device)
        peers = {"flashmla": flashmla_decode(work), "flash_attention_3": fa3_decode(work)} if there else {}
        yield beside(work, problem.name, peers, "graph")


def decode_e4m3(device: torch.device) -> Iterator[list[checked.Case]]:
    there = load(device)
    for batch, s_q, h_q, keys in DECODE:
        problem = sized(DenseDecode(batch, s_q, h_q, keys, causal=s_q > 1, cache_format="fp8"), device)
        work = prepare(problem, device)
        yield beside(work, problem.name, {"flashmla": flashmla_e4m3(work)} if there else {}, "graph", exact=False)


def sparse_decode(device: torch.device) -> Iterator[list[checked.Case]]:
    there = load(device)
    v32 = [SparseDecode("v32", b, 2, h, 2048, 32768, 64) for b, h in ((128, 128), (64, 128), (2, 128), (64, 64))]
    model1 = [
        SparseDecode("model1", b, 2, h, 128, 16384, 256, 512, 16384, 64) for b, h in ((128, 64), (64, 64), (2, 64))
    ]
    for problem in (sized(problem, device) for problem in (*v32, *model1)):
        work = prepare(problem, device)
        yield beside(work, problem.name, {"flashmla": flashmla_sparse(work)} if there else {})


def sparse_prefill(device: torch.device) -> Iterator[list[checked.Case]]:
    there = load(device)
    for shape in ((576, 128, 2048, 8192), (576, 128, 2048, 32768), (576, 128, 2048, 131072), (512, 64, 512, 65536)):
        problem = sized(SparsePrefill(*shape), device)
        work = prepare(problem, device)
        yield beside(work, problem.name, {"flashmla": flashmla_prefill(work)} if there else {})


def dense_prefill(device: torch.device) -> Iterator[list[checked.Case]]:
    there = load(device)
    for batch, h_q, tokens in ((1, 128, 8192), (1, 16, 8192), (1, 16, 32768), (16, 16, 2048), (64, 16, 512)):
        problem = sized(DensePrefill(192, batch, h_q, tokens, causal=True), device)
        work = prepare(problem, device)
        yield beside(work, problem.name, {"flash_attention_3": fa3_prefill(work)} if there else {})


def sized(problem, device: torch.device):
    return problem if device.type == "cuda" else problem.scaled_down()


def flashmla_decode(work: DenseDecodeWorkload):
    plan: list[torch.Tensor | None] = [None, None]
    scale = work.q.shape[-1] ** -0.5

    def run() -> Results:
        out, lse, *made = torch.ops._flashmla_C.dense_decode_fwd(
            work.q, work.k_cache, LATENT, work.cache_seqlens, work.block_table, scale, work.causal, *plan, None
        )
        plan[:] = made
        return {"out": out, "lse": lse}

    return run


def flashmla_e4m3(work: DenseDecodeWorkload):
    batch, s_q, h_q, head_dim = work.q.shape
    plan = torch.ops._flashmla_extension_C.get_mla_decoding_metadata_dense_fp8(work.cache_seqlens, s_q * h_q, 1)
    q_scale = work.q.abs().max().float().reshape(1) / LARGEST_E4M3
    q = (work.q.float() / q_scale).to(torch.float8_e4m3fn)
    k_scale = torch.tensor([work.k_scale], device=q.device)

    def run() -> Results:
        out, lse = torch.ops._flashmla_extension_C.fwd_kvcache_mla_fp8(
            q,
            work.k_cache,
            LATENT,
            work.cache_seqlens,
            work.block_table,
            head_dim**-0.5,
            work.causal,
            *plan,
            q_scale,
            k_scale,
        )
        return {"out": out, "lse": lse}

    return run


def fa3_decode(work: DenseDecodeWorkload):
    batch, s_q, h_q, head_dim = work.q.shape
    longest, page_size = int(work.cache_seqlens.max()), work.k_cache.shape[1]
    starts = torch.arange(0, batch * s_q + 1, s_q, dtype=torch.int32, device=work.q.device)
    rope, latent = head_dim - LATENT, LATENT
    q = work.q.flatten(0, 1)
    plan = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        batch, s_q, longest, h_q, 1, rope, latent, q.dtype, work.cache_seqlens, starts, *[None] * 4, page_size, 0, True,
        -1, -1, False, SPLITS, None, 0,
    )  # fmt: skip

    def run() -> Results:
        out, lse, *_ = torch.ops._vllm_fa3_C.fwd(
            q[..., latent:], work.k_cache[..., latent:], work.k_cache[..., :latent], None, None, q[..., :latent], None,
            starts, None, None, None, work.cache_seqlens, s_q, longest, work.block_table, *[None] * 5, *[None] * 3,
            head_dim**-0.5, True, -1, -1, 0.0, True, plan, SPLITS, None, 0, None, 1, 0, None,
        )  # fmt: skip
        return {"out": out.unflatten(0, (batch, s_q)), "lse": lse.unflatten(1, (batch, s_q)).permute(1, 0, 2)}

    return run


def fa3_prefill(work: DensePrefillWorkload):
    def run() -> Results:
        starts = work.cu_seqlens
        out, lse, *_ = torch.ops._vllm_fa3_C.fwd(
            work.q, work.k, work.v, *[None] * 4, starts, starts, None, None, None, work.longest, work.longest,
            None, *[None] * 5, *[None] * 3, work.q.shape[-1] ** -0.5, work.causal, -1, -1, 0.0, True, None, 0, None, 0,
            None, 1, 0, None,
        )  # fmt: skip
        return {"out": out, "lse": lse.T}

    return run


def flashmla_sparse(work: SparseDecodeWorkload):
    plan: list[torch.Tensor | None] = [None, None]
    extra = work.extra
    more = (None, None, None) if extra is None else (extra.cache, extra.indices, extra.lengths)

    def run() -> Results:
        out, lse, *made = torch.ops._flashmla_C.sparse_decode_fwd(
            work.q, work.main.cache, work.main.indices, None, work.attn_sink, *plan, *more, LATENT,
            work.q.shape[-1] ** -0.5, None,
        )  # fmt: skip
        plan[:] = made
        return {"out": out, "lse": lse}

    return run


def flashmla_prefill(work: SparsePrefillWorkload):
    def run() -> Results:
        scale = work.q.shape[-1] ** -0.5
        out, max_logits, lse = torch.ops._flashmla_C.sparse_prefill_fwd(
            work.q, work.kv, work.indices, scale, LATENT, work.attn_sink, None, None
        )
        return {"out": out, "max_logits": max_logits, "lse": lse}

    return run


SECTIONS: checked.Sections = {
    "decode": decode,
    "decode_floors": decode_floors,
    "decode_e4m3": decode_e4m3,
    "dense_prefill": dense_prefill,
    "sparse_decode": sparse_decode,
    "sparse_prefill": sparse_prefill,
}

if __name__ == "__main__":
    sys.exit(checked.main(__doc__ or "", SECTIONS))
