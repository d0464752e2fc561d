"""Pages within a cache, records out of one, and keys and values of grouped heads into one."""

from __future__ import annotations

from typing import Any

import torch

import flashlatte
from flashlatte import kv_cache
from flashlatte.bench.problems import CacheCopy, GatherRecords, ReshapeAndCache
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import Outputs, Results, Workload
from flashlatte.bench.workloads.cache import CacheGatherWorkload
from flashlatte.bench.workloads.tokens import EQUAL, POISON_BYTE, nbytes
from flashlatte.runtime import dispatch

BF16, HEAD_DIM = torch.bfloat16, 128
DTYPES = {"bf16": BF16, "e4m3": torch.float8_e4m3fn, "int8": torch.int8}


class CacheCopyWorkload(Workload):
    def __init__(self, problem: CacheCopy, device: torch.device) -> None:
        rng, pages = draw.generator(device), problem.pages
        layout = kv_cache.get_format(problem.cache_format)
        self.cache = draw.quantised_cache(layout.name, 2 * pages, problem.page_size, rng)
        self.source, target = (torch.randperm(pages, generator=rng, device=device) for _ in range(2))
        self.target = target + pages
        self.bytes_moved = nbytes(self.cache)
        self.tolerances = {"copied": EQUAL}
        self.call = dispatch.CallSpec(problem.operation, device, self.cache.dtype, page_size=problem.page_size)

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        kv_cache.copy_blocks(self.cache, self.source, self.target, backend=backend)
        return {"copies": self.cache[len(self.source) :].view(torch.uint8)}

    def poisoned_outputs(self) -> Outputs:
        self.cache[len(self.source) :].view(torch.uint8).fill_(POISON_BYTE)
        return {}

    def compared(self, results: Results) -> Results:
        return {"copied": results["copies"][self.target - len(self.source)]}

    def reference(self) -> Results:
        return {"copied": self.cache.view(torch.uint8)[self.source]}


class GatherRecordsWorkload(CacheGatherWorkload):
    def __init__(self, problem: GatherRecords, device: torch.device) -> None:
        super().__init__(problem, device)
        self.record_shape = (self.total_tokens, self._records(0, "reference").shape[1])
        self.bytes_moved = 2 * self.total_tokens * kv_cache.get_format(problem.cache_format).bytes_per_token

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        return {"out": self._records(self.total_tokens, backend, **(outputs or {}))}

    def poisoned_outputs(self) -> Outputs:
        size = self.record_shape[1] * self.cache.dtype.itemsize
        poison = torch.full((self.total_tokens, size), POISON_BYTE, dtype=torch.uint8, device=self.cache.device)
        return {"out": poison.view(self.cache.dtype)}

    def reference(self) -> Results:
        return self.run("reference")

    def _records(self, tokens: int, backend: str, **options: Any) -> torch.Tensor:
        options |= {"cache_format": self.cache_format, "backend": backend}
        return kv_cache.gather_records(self.cache, self.block_table, self.cu_seqlens, tokens, **options)


class ReshapeAndCacheWorkload(Workload):
    def __init__(self, problem: ReshapeAndCache, device: torch.device) -> None:
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

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        return self._write(self.written, backend)

    def poisoned_outputs(self) -> Outputs:
        for tensor in self.written.values():
            tensor.zero_()
        return {}

    def compared(self, results: Results) -> Results:
        return {name: result.float() for name, result in results.items()}

    def reference(self) -> Results:
        return self.compared(self._write(self._empty(), "reference"))

    def _empty(self) -> Results:
        caches = {name: torch.zeros(self.shape, device=self.key.device).to(self.dtype) for name in ("k", "v")}
        if self.scaled:
            caches |= {name: torch.zeros(self.shape[:3], device=self.key.device) for name in ("k_scale", "v_scale")}
        return caches

    def _write(self, into: Results, backend: str) -> Results:
        scales = {name: into[name] for name in ("k_scale", "v_scale") if self.scaled}
        arguments = (self.key, self.value, into["k"], into["v"], self.slots)
        flashlatte.reshape_and_cache(*arguments, **scales, backend=backend)
        return into
