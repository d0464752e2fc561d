"""Dense decode over a paged cache of randn / 10 with its pages in random order."""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.bench.problems import DenseDecode
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import ALL, Outputs, Results, Rows, Workload, nan_decode_outputs, spread
from flashlatte.ops.dense_decode import dense_decode
from flashlatte.runtime import dispatch
from flashlatte.testing import compare

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIM_V = 512
FP8_SCALE = 0.002
KEYS_COMPARED = 2**20


class DenseDecodeWorkload(Workload, problem=DenseDecode):
    def __init__(self, problem: DenseDecode, device: torch.device) -> None:
        rng = draw.generator(device)
        batch, s_q, h_q, head_dim = problem.batch, problem.s_q, problem.h_q, problem.head_dim
        dtype = DTYPES[problem.dtype]
        if problem.varlen:
            self.cache_seqlens = draw.varying_lengths(problem.keys, batch, s_q, rng)
        elif problem.uneven:
            self.cache_seqlens = torch.tensor([problem.keys, *problem.uneven], dtype=torch.int32, device=device)
        else:
            self.cache_seqlens = torch.full((batch,), problem.keys, dtype=torch.int32, device=device)
        lengths = self.cache_seqlens.tolist()
        pages_each = -(-max(lengths) // problem.page_size)
        self.block_table = draw.block_table(batch, pages_each, rng)
        self.q = draw.normal((batch, s_q, h_q, head_dim), dtype, rng)
        self.k_cache = draw.normal((batch * pages_each, problem.page_size, 1, head_dim), dtype, rng)
        self.k_scale = None
        if problem.cache_format == "fp8":
            self.k_cache = (self.k_cache / FP8_SCALE).to(torch.float8_e4m3fn)
            self.k_scale = FP8_SCALE
        self.causal = problem.causal
        self.precision = problem.precision

        hidden = s_q * (s_q - 1) // 2 if problem.causal else 0
        attended = sum(s_q * length - hidden for length in lengths)
        self.flops = 2 * h_q * (head_dim + HEAD_DIM_V) * attended
        rows = batch * s_q * h_q
        cache_bytes = self.k_cache.dtype.itemsize * sum(lengths) * head_dim
        self.bytes_moved = dtype.itemsize * rows * (head_dim + HEAD_DIM_V) + cache_bytes
        self.chosen = spread(batch, KEYS_COMPARED // problem.keys, device)
        out = compare.DENSE_DECODE_FP8_OUT if problem.precision else compare.DENSE_DECODE_OUT
        self.tolerances = {"out": out, "lse": compare.DECODE_LSE}
        cache_format = problem.cache_format or problem.dtype
        layout = (cache_format, problem.page_size, head_dim, HEAD_DIM_V)
        features = f"precision={problem.precision!r}" if problem.precision else None
        self.call = dispatch.CallSpec(
            problem.operation, device, dtype, *layout, h_q=h_q, h_kv=1, optional_features=features
        )

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        q, table, lengths = self.q, self.block_table, self.cache_seqlens
        if rows is not ALL:  # host time counts
            q, table, lengths = q[rows], table[rows], lengths[rows]
        options = {"causal": self.causal, "k_scale": self.k_scale, "precision": self.precision, **outputs}
        out, lse = dense_decode(q, self.k_cache, table, lengths, backend=backend, **options)
        return {"out": out, "lse": lse}

    def poisoned_outputs(self) -> Outputs:
        return nan_decode_outputs(self.q, HEAD_DIM_V)
