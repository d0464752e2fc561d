"""DeepSeek-V4's compressor."""

from __future__ import annotations

import torch

import flashlatte
from flashlatte import kv_cache
from flashlatte.bench.problems import Compress
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import Outputs, Results, Workload
from flashlatte.bench.workloads.tokens import FOUR_BITS, ONE_BYTE, POISON_BYTE, nbytes, rotations
from flashlatte.kv_cache.registry import as_format
from flashlatte.runtime import dispatch
from flashlatte.testing.compare import Tolerance

PAGE_SIZE = 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCES: dict[str, Tolerance] = {"model1": ONE_BYTE, "index_fp8": ONE_BYTE, "index_mxfp4": FOUR_BITS}


class CompressWorkload(Workload):
    # A call writes states, which others would read at the same time.
    overlaps = False

    def __init__(self, problem: Compress, device: torch.device) -> None:
        rng, ratio, dtype = draw.generator(device), problem.ratio, DTYPES[problem.dtype]
        # Of each request, the first token of the step and how many there are. The groups of as many requests end in
        # this step as in any other.
        spans = [(0, problem.tokens)]
        if problem.requests:
            spans = [(100 * ratio + i % ratio, 1) for i in range(problem.requests)]
        overlaps = ratio == 4
        head_dim = 128 if problem.cache_format.startswith("index") else 512
        width = head_dim * (1 + overlaps)
        ids = torch.cat([torch.full((count,), i) for i, (_, count) in enumerate(spans)]).to(device)
        positions = torch.cat([torch.arange(first, first + count) for first, count in spans]).to(device)
        pages_each = max(first + count for first, count in spans) // ratio // PAGE_SIZE + 1
        self.slots = ids * pages_each * PAGE_SIZE + positions // ratio
        # A ring of states, of as many tokens as a row is made of.
        state_page, columns = (PAGE_SIZE, ratio // PAGE_SIZE) if ratio > PAGE_SIZE else (4, 2 * ratio // 4)
        self.states = draw.normal((len(spans) * columns, state_page, 2 * width), torch.float32, rng) * 10
        kv, score = (draw.normal((len(ids), 2 * width), dtype, rng) * 10).split(width, dim=1)
        self.arguments = (
            kv,
            score,
            draw.normal((ratio, width), torch.float32, rng) * 10,
            torch.rand(head_dim, generator=rng, device=device) + 0.5,
            rotations(rng),
            ids,
            positions,
        )
        self.table = torch.arange(len(self.states), device=device).view(len(spans), columns)
        self.layout = as_format(problem.cache_format, head_dim)
        self.cache = kv_cache.allocate(self.layout, len(spans) * pages_each, PAGE_SIZE, device=device)
        self.written = self.slots[positions % ratio == ratio - 1]

        members = ratio * (1 + overlaps) if problem.requests else 0  # read from the states, for each row
        record = self.layout.record_width * self.layout.record_dtype.itemsize
        self.bytes_moved = nbytes(kv, score) + len(self.written) * (members * 2 * head_dim * 4 + record)
        if problem.requests:
            self.bytes_moved += len(ids) * 2 * width * 4
        self.tolerances = {"rows": TOLERANCES[problem.cache_format]}
        self.call = dispatch.CallSpec(problem.operation, device, dtype, self.layout.name, PAGE_SIZE, head_dim)

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        return self._compress(self.cache, self.states, backend)

    def poisoned_outputs(self) -> Outputs:
        self.cache.view(torch.uint8).fill_(POISON_BYTE)
        return {}

    def compared(self, results: Results) -> Results:
        rows = self.layout.decode(self.layout.page_views(results["cache"]), 1.0)
        return {"rows": rows.flatten(0, 1)[self.written]}

    def reference(self) -> Results:
        return self.compared(self._compress(torch.zeros_like(self.cache), self.states.clone(), "reference"))

    def _compress(self, cache: torch.Tensor, states: torch.Tensor, backend: str) -> Results:
        options = {"state_cache": states, "state_table": self.table, "cache_format": self.layout}
        flashlatte.compress(*self.arguments, cache, self.slots, **options, backend=backend)
        return {"cache": cache}
