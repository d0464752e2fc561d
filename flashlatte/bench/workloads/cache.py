"""Rows, records and pages into paged caches, out of them, and within them."""

from __future__ import annotations

from typing import Any

import torch

import flashlatte
from flashlatte import kv_cache
from flashlatte.bench import problems
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import EQUAL, POISON_BYTE, Outputs, Results, Rows, Workload, nbytes
from flashlatte.ops.cache_gather import cache_gather
from flashlatte.ops.cache_write import cache_write
from flashlatte.runtime import dispatch

ROW_BYTES = 2
BF16, HEAD_DIM = torch.bfloat16, 128
DTYPES = {"bf16": BF16, "e4m3": torch.float8_e4m3fn, "int8": torch.int8}


class CacheWriteWorkload(Workload, problem=problems.CacheWrite):
    def __init__(self, problem: problems.CacheWrite, device: torch.device) -> None:
        rng = draw.generator(device)
        layout = kv_cache.get_format(problem.cache_format)
        pages = -(-2 * problem.tokens // problem.page_size)
        self.cache_format = problem.cache_format
        self.cache = kv_cache.allocate(layout, pages, problem.page_size, device=device)
        slots = torch.randperm(pages * problem.page_size, generator=rng, device=device)
        self.slot_mapping = slots[: problem.tokens].int()
        self.rows = draw.normal((problem.tokens, layout.head_dim), torch.bfloat16, rng)

        self.bytes_moved = problem.tokens * (layout.head_dim * ROW_BYTES + layout.bytes_per_token)
        self.tolerances = {"cache": EQUAL}
        self.call = dispatch.CallSpec(
            problem.operation, device, self.rows.dtype, layout.name, problem.page_size, layout.head_dim
        )

    def compute(self, rows: Rows, backend: str, cache: torch.Tensor | None = None) -> Results:
        cache = self.cache if cache is None else cache
        cache_write(cache, self.slot_mapping, self.rows, cache_format=self.cache_format, backend=backend)
        return {"cache": cache}

    def poisoned_outputs(self) -> Outputs:
        self.cache.fill_(POISON_BYTE)
        return {}

    def reference(self) -> Results:
        return self.compute(self.chosen, "reference", torch.full_like(self.cache, POISON_BYTE))


class CacheGatherWorkload(Workload, problem=problems.CacheGather):
    def __init__(self, problem: problems.CacheGather, device: torch.device) -> None:
        rng = draw.generator(device)
        layout = kv_cache.get_format(problem.cache_format)
        tokens_each = problem.tokens // problem.requests
        pages_each = -(-tokens_each // problem.page_size)
        self.cache_format = problem.cache_format
        self.cache = draw.quantized_cache(layout.name, problem.requests * pages_each, problem.page_size, rng)
        self.block_table = draw.block_table(problem.requests, pages_each, rng)
        self.cu_seqlens = torch.arange(problem.requests + 1, dtype=torch.int32, device=device) * tokens_each
        self.total_tokens = problem.requests * tokens_each

        self.bytes_moved = self.total_tokens * (layout.head_dim * ROW_BYTES + layout.bytes_per_token)
        self.head_dim = layout.head_dim
        self.tolerances = {"out": EQUAL}
        self.call = dispatch.CallSpec(
            problem.operation, device, torch.bfloat16, layout.name, problem.page_size, layout.head_dim
        )

    def compute(self, rows: Rows, backend: str, out: torch.Tensor | None = None) -> Results:
        # Without ``out`` the call would also zero its result, which is no part of the gather.
        options = {"out": self._new_rows() if out is None else out, "cache_format": self.cache_format}
        return {"out": cache_gather(self.cache, self.block_table, self.cu_seqlens, **options, backend=backend)}

    def poisoned_outputs(self) -> Outputs:
        return {"out": self._new_rows().fill_(torch.nan)}

    def _new_rows(self) -> torch.Tensor:
        return torch.empty(self.total_tokens, self.head_dim, dtype=torch.bfloat16, device=self.cache.device)


class CacheCopyWorkload(Workload, problem=problems.CacheCopy):
    def __init__(self, problem: problems.CacheCopy, device: torch.device) -> None:
        rng, pages = draw.generator(device), problem.pages
        layout = kv_cache.get_format(problem.cache_format)
        self.cache = draw.quantized_cache(layout.name, 2 * pages, problem.page_size, rng)
        self.source, target = (torch.randperm(pages, generator=rng, device=device) for _ in range(2))
        self.target = target + pages
        self.bytes_moved = nbytes(self.cache)
        self.tolerances = {"copied": EQUAL}
        self.call = dispatch.CallSpec(problem.operation, device, self.cache.dtype, page_size=problem.page_size)

    def compute(self, rows: Rows, backend: str) -> Results:
        kv_cache.copy_blocks(self.cache, self.source, self.target, backend=backend)
        return {"copies": self.cache[len(self.source) :].view(torch.uint8)}

    def poisoned_outputs(self) -> Outputs:
        self.cache[len(self.source) :].view(torch.uint8).fill_(POISON_BYTE)
        return {}

    def compared(self, results: Results) -> Results:
        return {"copied": results["copies"][self.target - len(self.source)]}

    def reference(self) -> Results:
        return {"copied": self.cache.view(torch.uint8)[self.source]}


class GatherRecordsWorkload(CacheGatherWorkload, problem=problems.GatherRecords):
    def __init__(self, problem: problems.GatherRecords, device: torch.device) -> None:
        super().__init__(problem, device)
        self.record_shape = (self.total_tokens, self._records(0, "reference").shape[1])
        self.bytes_moved = 2 * self.total_tokens * kv_cache.get_format(problem.cache_format).bytes_per_token

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        return {"out": self._records(self.total_tokens, backend, **outputs)}

    def poisoned_outputs(self) -> Outputs:
        size = self.record_shape[1] * self.cache.dtype.itemsize
        poison = torch.full((self.total_tokens, size), POISON_BYTE, dtype=torch.uint8, device=self.cache.device)
        return {"out": poison.view(self.cache.dtype)}

    def _records(self, tokens: int, backend: str, **options: Any) -> torch.Tensor:
        options |= {"cache_format": self.cache_format, "backend": backend}
        return kv_cache.gather_records(self.cache, self.block_table, self.cu_seqlens, tokens, **options)


class ReshapeAndCacheWorkload(Workload, problem=problems.ReshapeAndCache):
    def __init__(self, problem: problems.ReshapeAndCache, device: torch.device) -> None:
        rng, tokens, heads, page_size = draw.generator(device), problem.tokens, problem.heads, problem.page_size
        self.key, self.value = (draw.normal((tokens, heads, HEAD_DIM), BF16, rng) * 10 for _ in range(2))
        self.shape = (-(-tokens // page_size), page_size, heads, HEAD_DIM)
        self.dtype, self.scaled = DTYPES[problem.dtype], problem.dtype != "bf16"
        self.slots = torch.randperm(self.shape[0] * page_size, generator=rng, device=device)[:tokens]
        self.written = self._empty()
        self.bytes_moved = nbytes(self.key, self.value, *self.written.values())
        self.tolerances = dict.fromkeys(self.written, EQUAL)
        self.call = dispatch.CallSpec(
            problem.operation, device, BF16, None, page_size, HEAD_DIM, HEAD_DIM, h_kv=problem.heads
        )

    def compute(self, rows: Rows, backend: str, into: Results | None = None) -> Results:
        into = self.written if into is None else into
        scales = {name: into[name] for name in ("k_scale", "v_scale") if self.scaled}
        arguments = (self.key, self.value, into["k"], into["v"], self.slots)
        flashlatte.reshape_and_cache(*arguments, **scales, backend=backend)
        return into

    def poisoned_outputs(self) -> Outputs:
        for tensor in self.written.values():
            tensor.zero_()
        return {}

    def read(self, results: Results) -> Results:
        return {name: result.float() for name, result in results.items()}

    def reference(self) -> Results:
        return self.read(self.compute(self.chosen, "reference", self._empty()))

    def _empty(self) -> Results:
        caches = {name: torch.zeros(self.shape, device=self.key.device).to(self.dtype) for name in ("k", "v")}
        if self.scaled:
            caches |= {name: torch.zeros(self.shape[:3], device=self.key.device) for name in ("k_scale", "v_scale")}
        return caches
