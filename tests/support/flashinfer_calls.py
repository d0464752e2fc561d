"""Requests as FlashInfer's callers pass them, and their attention in float64."""

# Tuples of arguments are unpacked.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from flashlatte.flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashlatte.testing import oracles

LATENT, ROPE = 32, 16
WORKSPACE = torch.empty(16, dtype=torch.uint8)


@dataclass
class MLARequests:
    """Requests with ``counts`` queries and ``lengths`` keys, whose pages are in random order.

    Attributes:
        q: [T, heads, latent + rope]; cache: [pages, page_size, latent + rope]; NaN in what no request has.
        lists: qo_indptr, kv_indptr, kv_indices and kv_len_arr.
    """

    counts: list[int]
    lengths: list[int]
    page_size: int
    causal: bool
    heads: int = 3
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    sm_scale: float = 0.2
    seed: int = 0
    latent: int = LATENT
    rope: int = ROPE
    device: str = "cpu"

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        pages = [-(-length // self.page_size) for length in self.lengths]
        order = torch.randperm(sum(pages) + 2, generator=generator)
        width = self.latent + self.rope
        rows = torch.randn(len(order), self.page_size, width, generator=generator)
        self.tables = list(order[: sum(pages)].split(pages))
        kv_dtype = self.kv_dtype or self.dtype
        cache = rows.to(kv_dtype)
        rows = torch.full(rows.shape, torch.nan)
        for table, length in zip(self.tables, self.lengths, strict=True):
            for position in range(length):
                page, offset = table[position // self.page_size], position % self.page_size
                rows[page, offset] = cache[page, offset].float()
        self.cache = rows.to(kv_dtype).to(self.device)
        q = torch.randn(sum(self.counts), self.heads, width, generator=generator)
        self.q = q.to(self.dtype).to(self.device)
        boundaries = [torch.tensor([0, *accumulate(counts)], dtype=torch.int32) for counts in (self.counts, pages)]
        indices = order[: sum(pages)].int()
        lists = (*boundaries, indices, torch.tensor(self.lengths, dtype=torch.int32))
        self.lists = tuple(values.to(self.device) for values in lists)

    def plan(self, wrapper: BatchMLAPagedAttentionWrapper) -> None:
        dtypes = (self.dtype, self.kv_dtype or self.dtype)
        dims = (self.heads, self.latent, self.rope, self.page_size)
        wrapper.plan(*self.lists, *dims, self.causal, self.sm_scale, *dtypes)

    def run(self, wrapper: BatchMLAPagedAttentionWrapper, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (*split(self.q, self.latent), *split(self.cache, self.latent))
        out, lse = wrapper.run(*parts, return_lse=True, **options)
        return out, lse

    def expected(self, k_scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """out [T, heads, latent] and base-2 lse [T, heads], float64."""
        outs, lses = [], []
        queries = self.q.split(self.counts)
        for q, table, length in zip(queries, self.tables, self.lengths, strict=True):
            out, lse = oracles.dense_decode(
                q.unsqueeze(0),
                self.cache.unsqueeze(2),
                table.view(1, -1) if len(table) else torch.zeros(1, 1, dtype=torch.int64),
                torch.tensor([length]),
                head_dim_v=self.latent,
                softmax_scale=self.sm_scale,
                causal=self.causal,
                k_scale=k_scale,
            )
            outs.append(out[0])
            lses.append(lse[0].T * math.log2(math.e))
        return torch.cat(outs), torch.cat(lses)


def split(x: torch.Tensor, latent: int = LATENT) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent columns and the others."""
    return x[..., :latent], x[..., latent:]


def buffers(requests: MLARequests, pages: int = 64) -> dict[str, Any]:
    """Arguments of a wrapper in CUDA-graph mode."""
    sizes = {"qo_indptr": len(requests.counts) + 1, "kv_indptr": len(requests.counts) + 1, "kv_indices": pages}
    sizes["kv_len_arr"] = len(requests.counts)
    device = requests.device
    tensors = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
    return {"use_cuda_graph": True} | tensors
