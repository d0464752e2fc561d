"""Sparse prefill: every query token selects random tokens of one contiguous latent."""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.bench.problems import SparsePrefill
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import Outputs, Results, Rows, Workload, nan_like, spread
from flashlatte.ops.sparse_prefill import sparse_prefill
from flashlatte.runtime import dispatch
from flashlatte.testing import compare

HEAD_DIM_V = 512
QUERIES_COMPARED = 256


class SparsePrefillWorkload(Workload, problem=SparsePrefill):
    def __init__(self, problem: SparsePrefill, device: torch.device) -> None:
        rng = draw.generator(device)
        s_q, h_q, head_dim, topk = problem.s_q, problem.h_q, problem.head_dim, problem.topk
        self.q = draw.normal((s_q, h_q, head_dim), torch.bfloat16, rng)
        self.kv = draw.normal((problem.s_kv, 1, head_dim), torch.bfloat16, rng)
        self.indices = draw.drifting(s_q, problem.s_kv, topk, problem.overlap, rng).int().unsqueeze(1)
        self.attn_sink = torch.randn(h_q, generator=rng, device=device)

        self.flops = 2 * h_q * (head_dim + HEAD_DIM_V) * s_q * topk
        distinct_keys = self.indices.unique().numel()
        self.bytes_moved = 2 * (s_q * h_q * (head_dim + HEAD_DIM_V) + distinct_keys * head_dim)
        self.chosen = spread(s_q, QUERIES_COMPARED, device)
        self.precision = problem.precision
        self.tolerances = {
            "out": compare.SPARSE_PREFILL_FP8_OUT if problem.precision else compare.SPARSE_PREFILL_OUT,
            "max_logits": compare.SPARSE_PREFILL_LSE,
            "lse": compare.SPARSE_PREFILL_LSE,
        }
        features = f"precision={problem.precision!r}" if problem.precision else None
        sizes: dict[str, Any] = {"head_dim": head_dim, "head_dim_v": HEAD_DIM_V, "h_q": h_q, "h_kv": 1}
        self.call = dispatch.CallSpec(problem.operation, device, self.q.dtype, **sizes, optional_features=features)

    def poisoned_outputs(self) -> Outputs:
        return {"out": nan_like(self.q[..., :HEAD_DIM_V]).contiguous()}

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        options = {"attn_sink": self.attn_sink, "precision": self.precision, "backend": backend, **outputs}
        results = sparse_prefill(self.q[rows], self.kv, self.indices[rows], **options)
        return dict(zip(("out", "max_logits", "lse"), results, strict=True))
