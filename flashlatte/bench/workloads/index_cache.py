"""Writes and reads of the indexer's key cache, and slots of the selected keys."""

from __future__ import annotations

from typing import Any

import torch

import flashlatte
from flashlatte import kv_cache
from flashlatte.bench.problems import IndexConvert, IndexGather, IndexQuantize, IndexWorkspace
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import EQUAL, POISON_BYTE, CacheWriter, Outputs, Results, Rows, Workload, nbytes
from flashlatte.kv_cache.registry import as_format
from flashlatte.runtime import dispatch
from flashlatte.testing.compare import Tolerance

BF16, HEAD_DIM = torch.bfloat16, 128
# A key at the midpoint of two values may round to either.
KEYS = Tolerance(1e-6, 0.13, 1e-5)


class IndexQuantizeWorkload(CacheWriter, problem=IndexQuantize):
    def __init__(self, problem: IndexQuantize, device: torch.device) -> None:
        rng, tokens, page_size = draw.generator(device), problem.tokens, problem.page_size
        pages = -(-2 * tokens // page_size)
        self.layout = as_format(problem.cache_format, HEAD_DIM)
        self.cache = kv_cache.allocate(self.layout, pages, page_size, device=device)
        self.k = draw.normal((tokens, HEAD_DIM), BF16, rng)
        self.slots = torch.randperm(pages * page_size, generator=rng, device=device)[:tokens]
        self.bytes_moved = nbytes(self.k) + tokens * self.layout.bytes_per_token
        self.tolerances = {"keys": KEYS}
        self.call = dispatch.CallSpec(problem.operation, device, BF16, self.layout.name, page_size, HEAD_DIM)

    def compute(self, rows: Rows, backend: str, cache: torch.Tensor | None = None) -> Results:
        cache = self.cache if cache is None else cache
        flashlatte.index_quantize(cache, self.slots, self.k, backend=backend)
        return {"cache": cache}


class IndexGatherWorkload(Workload, problem=IndexGather):
    def __init__(self, problem: IndexGather, device: torch.device) -> None:
        rng, requests, page_size = draw.generator(device), problem.requests, problem.page_size
        pages_each = -(-problem.tokens // page_size)
        self.cache = kv_cache.allocate(problem.cache_format, requests * pages_each, page_size, device=device)
        slots = torch.arange(requests * pages_each * page_size, device=device)
        flashlatte.index_quantize(
            self.cache, slots, draw.normal((len(slots), HEAD_DIM), BF16, rng), backend="reference"
        )
        self.table = draw.block_table(requests, pages_each, rng)
        self.cu_seqlens = torch.arange(requests + 1, dtype=torch.int32, device=device) * problem.tokens
        self.total = requests * problem.tokens
        self.bytes_moved = 2 * self.total * as_format(problem.cache_format, HEAD_DIM).bytes_per_token
        self.tolerances = {"values": EQUAL, "scales": EQUAL}
        self.call = dispatch.CallSpec(
            problem.operation, device, self.cache.dtype, problem.cache_format, page_size, HEAD_DIM
        )

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        options = {"head_dim": HEAD_DIM, "backend": backend, **outputs}
        values, scales = flashlatte.index_gather(self.cache, self.table, self.cu_seqlens, self.total, **options)
        assert scales is not None
        return {"values": values, "scales": scales}

    def poisoned_outputs(self) -> Outputs:
        device = self.cache.device
        values = torch.full((self.total, HEAD_DIM), POISON_BYTE, dtype=torch.uint8, device=device)
        scales = torch.full((self.total,), torch.nan, device=device)
        return {"values": values.view(torch.float8_e4m3fn), "scales": scales}

    def read(self, results: Results) -> Results:
        return {name: result.float() for name, result in results.items()}


class IndexConvertWorkload(Workload, problem=IndexConvert):
    def __init__(self, problem: IndexConvert, device: torch.device) -> None:
        rng, batch, shape = draw.generator(device), problem.batch, (problem.batch, problem.topk)
        self.page_size, self.compact = problem.page_size, problem.compact
        self.table = draw.block_table(batch, -(-problem.keys // problem.page_size), rng)
        # One in five is -1, no token.
        low = -problem.keys // 4
        self.indices = draw.integers(low, problem.keys, batch * problem.topk, rng).view(shape)
        self.bytes_moved = 2 * nbytes(self.indices) + 4 * batch
        self.tolerances = {"slots": EQUAL, "counts": EQUAL}
        self.call = dispatch.CallSpec(problem.operation, device, torch.int32)

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        options = {"compact": self.compact, "return_counts": True, "backend": backend, **outputs}
        slots, counts = flashlatte.index_convert(self.indices, self.table, self.page_size, **options)
        return {"slots": slots, "counts": counts}

    def poisoned_outputs(self) -> Outputs:
        return {"slots": torch.full_like(self.indices, -7)}


class IndexWorkspaceWorkload(Workload, problem=IndexWorkspace):
    def __init__(self, problem: IndexWorkspace, device: torch.device) -> None:
        rng, tokens = draw.generator(device), problem.tokens
        groups = max(tokens // problem.ratio, 1)
        self.indices = draw.integers(-groups // 4, groups, tokens * problem.topk, rng).view(tokens, problem.topk)
        self.cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        self.lengths = torch.tensor([tokens], dtype=torch.int32, device=device)
        self.sizes = {"window": problem.window, "ratio": problem.ratio, "window_row": groups}
        self.sizes["workspace_rows"] = groups + tokens
        self.bytes_moved = 2 * nbytes(self.indices) + 4 * tokens * (problem.window + 1)
        self.tolerances = {"rows": EQUAL, "counts": EQUAL}
        self.call = dispatch.CallSpec(problem.operation, device, torch.int32)

    def compute(self, rows: Rows, backend: str) -> Results:
        options = {**self.sizes, "backend": backend}
        arguments = (self.indices, self.cu_seqlens, self.lengths, len(self.indices))
        found, counts = flashlatte.index_workspace(*arguments, **options)
        return {"rows": found, "counts": counts}
