"""Rows into a paged cache, and tokens of several requests out of one."""

from __future__ import annotations

import torch

from flashlatte import kv_cache
from flashlatte.bench.problems import CacheGather, CacheWrite
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import Outputs, Results, Workload
from flashlatte.ops.cache_gather import cache_gather
from flashlatte.ops.cache_write import cache_write
from flashlatte.runtime import dispatch
from flashlatte.testing.compare import Tolerance

EQUAL = Tolerance(0.0, 0.0)
POISON_BYTE = 0xFF
ROW_BYTES = 2


class CacheWriteWorkload(Workload):
    def __init__(self, problem: CacheWrite, device: torch.device) -> None:
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

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        cache_write(self.cache, self.slot_mapping, self.rows, cache_format=self.cache_format, backend=backend)
        return {"cache": self.cache}

    def poisoned_outputs(self) -> Outputs:
        self.cache.fill_(POISON_BYTE)
        return {}

    def reference(self) -> Results:
        cache = torch.full_like(self.cache, POISON_BYTE)
        cache_write(cache, self.slot_mapping, self.rows, cache_format=self.cache_format, backend="reference")
        return {"cache": cache}


class CacheGatherWorkload(Workload):
    def __init__(self, problem: CacheGather, device: torch.device) -> None:
        rng = draw.generator(device)
        layout = kv_cache.get_format(problem.cache_format)
        tokens_each = problem.tokens // problem.requests
        pages_each = -(-tokens_each // problem.page_size)
        self.cache_format = problem.cache_format
        self.cache = draw.quantised_cache(layout.name, problem.requests * pages_each, problem.page_size, rng)
        self.block_table = draw.block_table(problem.requests, pages_each, rng)
        self.cu_seqlens = torch.arange(problem.requests + 1, dtype=torch.int32, device=device) * tokens_each
        self.total_tokens = problem.requests * tokens_each

        self.bytes_moved = self.total_tokens * (layout.head_dim * ROW_BYTES + layout.bytes_per_token)
        self.head_dim = layout.head_dim
        self.tolerances = {"out": EQUAL}
        self.call = dispatch.CallSpec(
            problem.operation, device, torch.bfloat16, layout.name, problem.page_size, layout.head_dim
        )

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        # Without ``out`` the call would also zero its result, which is no part of the gather.
        out = outputs["out"] if outputs else self._new_rows()
        return {"out": self._gather(out, backend)}

    def poisoned_outputs(self) -> Outputs:
        return {"out": self._new_rows().fill_(torch.nan)}

    def reference(self) -> Results:
        return {"out": self._gather(self._new_rows(), "reference")}

    def _new_rows(self) -> torch.Tensor:
        return torch.empty(self.total_tokens, self.head_dim, dtype=torch.bfloat16, device=self.cache.device)

    def _gather(self, out: torch.Tensor, backend: str) -> torch.Tensor:
        return cache_gather(
            self.cache, self.block_table, self.cu_seqlens, cache_format=self.cache_format, out=out, backend=backend
        )
