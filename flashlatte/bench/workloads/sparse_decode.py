"""Sparse decode: every query token selects its own random tokens of its request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashlatte import kv_cache
from flashlatte.bench.problems import SparseDecode
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import Outputs, Results, Rows, Workload, nan_decode_outputs, spread
from flashlatte.ops.index_convert import to_cache_indices
from flashlatte.ops.sparse_decode import sparse_decode
from flashlatte.runtime import dispatch
from flashlatte.testing import compare

HEAD_DIM_V = 512
KEYS_COMPARED = 2**20

# FlashMLA's recorded cases with extra lengths attend to 550 of 1,024 extra tokens in the mean.
SHORTEST_EXTRA_SHARE = 76 / 1024


@dataclass
class SelectedTokens:
    """A cache, the slots that each query token selects, and the number of them that are used (all if None)."""

    cache: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor | None = None

    def counts(self) -> torch.Tensor:
        """int64 [b], number of used tokens for each query token of a request."""
        batch, _, topk = self.indices.shape
        if self.lengths is None:
            return torch.full((batch,), topk, dtype=torch.int64)
        return self.lengths.long().cpu()

    def distinct_tokens(self) -> int:
        if self.lengths is None:
            return self.indices.unique().numel()
        position = torch.arange(self.indices.shape[-1], device=self.indices.device)
        counted = position < self.lengths[:, None, None]
        return self.indices[counted.expand_as(self.indices)].unique().numel()


class SparseDecodeWorkload(Workload, problem=SparseDecode):
    def __init__(self, problem: SparseDecode, device: torch.device) -> None:
        rng = draw.generator(device)
        batch, s_q, h_q, head_dim = problem.batch, problem.s_q, problem.h_q, problem.head_dim
        layout = kv_cache.get_format(problem.cache_format)
        self.cache_format = problem.cache_format
        self.q = draw.normal((batch, s_q, h_q, head_dim), torch.bfloat16, rng)
        self.attn_sink = torch.randn(h_q, generator=rng, device=device)
        self.main = _select(problem, problem.tokens, problem.page_size, problem.topk, rng)
        self.extra: SelectedTokens | None = None
        if problem.extra_topk:
            self.extra = _select(problem, problem.extra_tokens, problem.extra_page_size, problem.extra_topk, rng)
            if problem.extra_varlen:
                shortest = max(round(problem.extra_topk * SHORTEST_EXTRA_SHARE), 1)
                self.extra.lengths = draw.even_lengths(shortest, problem.extra_topk, batch, rng)

        scopes = [self.main] if self.extra is None else [self.main, self.extra]
        attended = s_q * int(sum(scope.counts().sum() for scope in scopes))
        self.flops = 2 * h_q * (head_dim + HEAD_DIM_V) * attended
        self.bytes_moved = 2 * batch * s_q * h_q * (head_dim + HEAD_DIM_V)
        self.bytes_moved += layout.bytes_per_token * sum(scope.distinct_tokens() for scope in scopes)
        keys_each = s_q * (problem.topk + problem.extra_topk)
        self.chosen = spread(batch, KEYS_COMPARED // keys_each, device)
        self.tolerances = {"out": compare.SPARSE_DECODE_OUT, "lse": compare.DECODE_LSE}
        cache = (problem.cache_format, problem.page_size, head_dim, HEAD_DIM_V)
        self.call = dispatch.CallSpec(problem.operation, device, self.q.dtype, *cache, h_q=h_q, h_kv=1)

    def poisoned_outputs(self) -> Outputs:
        return nan_decode_outputs(self.q, HEAD_DIM_V)

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        extra: dict[str, Any] = {}
        if self.extra is not None:
            lengths = self.extra.lengths
            extra = {
                "extra_k_cache": self.extra.cache,
                "extra_indices": self.extra.indices[rows],
                "extra_topk_length": None if lengths is None else lengths[rows],
            }
        options = {
            "cache_format": self.cache_format,
            "attn_sink": self.attn_sink,
            "backend": backend,
            **extra,
            **outputs,
        }
        out, lse = sparse_decode(self.q[rows], self.main.cache, self.main.indices[rows], **options)
        return {"out": out, "lse": lse}


def _select(problem: SparseDecode, tokens: int, page_size: int, topk: int, rng: torch.Generator) -> SelectedTokens:
    pages_each = -(-tokens // page_size)
    cache = draw.quantized_cache(problem.cache_format, problem.batch * pages_each, page_size, rng)
    table = draw.block_table(problem.batch, pages_each, rng)
    positions = draw.distinct(problem.batch * problem.s_q, tokens, topk, rng)
    positions = positions.view(problem.batch, problem.s_q, topk)
    return SelectedTokens(cache, to_cache_indices(positions, table, page_size))
