"""Paged attention of grouped queries: decode, prefill, and batches of both."""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.bench.problems import PagedAttention
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import ROUNDED, Outputs, Results, Rows, Workload, nan_like, nbytes
from flashlatte.ops.paged_attention import paged_attention
from flashlatte.runtime import dispatch

BF16, HEAD_DIM = torch.bfloat16, 128
DTYPES = {"bf16": BF16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
SCALE = 1 / 64


class PagedAttentionWorkload(Workload, problem=PagedAttention):
    """Requests' pages are in random order."""

    def __init__(self, problem: PagedAttention, device: torch.device) -> None:
        rng, keys, page_size = draw.generator(device), problem.keys, problem.page_size
        queries = [1] * problem.batch + ([min(problem.queries, keys)] if problem.queries else [])
        requests, pages = len(queries), -(-keys // page_size)
        shape = (requests * pages, page_size, problem.h_kv, HEAD_DIM)
        scale = None if problem.dtype == "bf16" else SCALE
        k_cache, v_cache = (
            (draw.normal(shape, BF16, rng) / (scale or 1.0)).to(DTYPES[problem.dtype]) for _ in range(2)
        )
        self.q = draw.normal((sum(queries), problem.h_q, HEAD_DIM), BF16, rng) * 10
        self.arguments: dict[str, Any] = {
            "q": self.q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "block_table": draw.block_table(requests, pages, rng),
            "seqused_k": torch.full((requests,), keys, dtype=torch.int32, device=device),
            "cu_seqlens_q": torch.tensor([0, *queries], device=device).cumsum(0).int(),
            "causal": True,
            "k_scale": scale,
            "v_scale": scale,
        }
        pairs = sum(s * keys - s * (s - 1) // 2 for s in queries)
        self.flops = 4 * problem.h_q * HEAD_DIM * pairs if problem.queries else None
        self.bytes_moved = 2 * nbytes(self.q) + 2 * requests * keys * problem.h_kv * HEAD_DIM * k_cache.element_size()
        self.tolerances = {"out": ROUNDED, "lse": ROUNDED}
        rows = (len(self.q) - requests + 1) * problem.h_q
        sizes: dict[str, Any] = {"h_q": problem.h_q, "h_kv": problem.h_kv, "rows": rows}
        self.call = dispatch.CallSpec(problem.operation, device, BF16, None, page_size, HEAD_DIM, HEAD_DIM, **sizes)

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        out, lse = paged_attention(**self.arguments, **outputs, backend=backend)
        return {"out": out, "lse": lse}

    def poisoned_outputs(self) -> Outputs:
        tokens, heads, _ = self.q.shape
        lse = torch.full((heads, tokens), torch.nan, device=self.q.device).T
        return {"out": nan_like(self.q), "lse": lse}
