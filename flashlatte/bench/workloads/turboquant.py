"""TurboQuant: decode over a cache, and writes of new tokens."""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.bench.problems import TurboQuantDecode, TurboQuantGather, TurboQuantStore
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import ROUNDED, Outputs, Results, Rows, Workload, nan_like, nbytes, spread
from flashlatte.kv_cache import turboquant
from flashlatte.ops.turboquant_decode import turboquant_decode
from flashlatte.ops.turboquant_gather import turboquant_gather
from flashlatte.ops.turboquant_store import turboquant_store
from flashlatte.runtime import dispatch
from flashlatte.testing.compare import Tolerance

HEAD_DIM = 128
NUMBER_BYTES = 2
STORED_AT_ONCE = 65536
KEYS_COMPARED = 2**16
TOKENS_COMPARED = 512
# The kernel's queries are fp16 after their rotation, and its weights bf16.
DECODE_OUT, DECODE_LSE = Tolerance(1e-3, 8.01 / 128, 5e-5), Tolerance(1e-3, 1e-4, 1e-6)
# A few values are within float32's rounding of a midpoint, and may have either of two codes.
STORED = Tolerance(0.1, 0.0, 1e-6)


class TurboQuantDecodeWorkload(Workload, problem=TurboQuantDecode):
    def __init__(self, problem: TurboQuantDecode, device: torch.device) -> None:
        rng = draw.generator(device)
        layout = turboquant.turboquant_format(problem.cache_format, HEAD_DIM)
        batch, h_q, h_kv = problem.batch, problem.h_q, problem.h_kv
        pages_each = -(-problem.keys // problem.page_size)
        self.cache = turboquant.allocate(
            layout.name, batch * pages_each, problem.page_size, h_kv, HEAD_DIM, device=device
        )
        slots = torch.arange(batch * pages_each * problem.page_size, device=device)
        for some in slots.split(STORED_AT_ONCE):
            key, value = (draw.normal((len(some), h_kv, HEAD_DIM), torch.bfloat16, rng) for _ in range(2))
            turboquant_store(key, value, self.cache, some)
        self.block_table = draw.block_table(batch, pages_each, rng)
        self.cache_seqlens = torch.full((batch,), problem.keys, dtype=torch.int32, device=device)
        self.q = draw.normal((batch, 1, h_q, HEAD_DIM), torch.bfloat16, rng) * 10

        self.flops = 4 * h_q * HEAD_DIM * batch * problem.keys
        records = batch * problem.keys * h_kv * layout.record_bytes
        self.bytes_moved = 2 * NUMBER_BYTES * batch * h_q * HEAD_DIM + records
        self.chosen = spread(batch, KEYS_COMPARED // problem.keys, device)
        self.tolerances = {"out": DECODE_OUT, "lse": DECODE_LSE}
        cache = (layout.name, problem.page_size, HEAD_DIM, HEAD_DIM)
        self.call = dispatch.CallSpec(problem.operation, device, self.q.dtype, *cache, h_q=h_q, h_kv=h_kv)

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        arguments = (self.q[rows], self.cache, self.block_table[rows], self.cache_seqlens[rows])
        out, lse = turboquant_decode(*arguments, backend=backend, **outputs)
        return {"out": out, "lse": lse}

    def poisoned_outputs(self) -> Outputs:
        lse = self.q.new_full(self.q.shape[:3], torch.nan, dtype=torch.float32)
        return {"out": nan_like(self.q), "lse": lse.transpose(1, 2)}


class TurboQuantStoreWorkload(Workload, problem=TurboQuantStore):
    def __init__(self, problem: TurboQuantStore, device: torch.device) -> None:
        rng = draw.generator(device)
        self.layout = turboquant.turboquant_format(problem.cache_format, HEAD_DIM)
        shape = (problem.tokens, problem.h_kv, HEAD_DIM)
        pages = -(-problem.tokens // problem.page_size)
        self.key, self.value = (draw.normal(shape, torch.bfloat16, rng) for _ in range(2))
        self.cache = turboquant.allocate(
            self.layout.name, pages, problem.page_size, problem.h_kv, HEAD_DIM, device=device
        )
        self.slot_mapping = torch.randperm(pages * problem.page_size, generator=rng, device=device)[: problem.tokens]
        self.tokens_compared = spread(problem.tokens, TOKENS_COMPARED, device)

        self.bytes_moved = problem.tokens * problem.h_kv * (2 * HEAD_DIM * NUMBER_BYTES + self.layout.record_bytes)
        self.tolerances = {"records": STORED}
        self.call = dispatch.CallSpec(
            problem.operation, device, self.key.dtype, self.layout.name, problem.page_size, HEAD_DIM, HEAD_DIM
        )

    def compute(self, rows: Rows, backend: str, cache: torch.Tensor | None = None) -> Results:
        cache = self.cache if cache is None else cache
        turboquant_store(self.key, self.value, cache, self.slot_mapping, backend=backend)
        return {"records": cache}

    def poisoned_outputs(self) -> Outputs:
        self.cache.fill_(0xFF)
        return {}

    def reference(self) -> Results:
        return self.read(self.compute(self.chosen, "reference", torch.zeros_like(self.cache)))

    def read(self, results: Results) -> Results:
        cache, slots = results["records"], self.slot_mapping[self.tokens_compared]
        sides = self.layout.decode(cache[slots // cache.shape[1], slots % cache.shape[1]])
        return {"records": torch.stack(sides)}


class TurboQuantGatherWorkload(TurboQuantStoreWorkload, problem=TurboQuantGather):
    """The tokens are in one request's pages, in random order."""

    def __init__(self, problem: TurboQuantGather, device: torch.device) -> None:
        super().__init__(problem, device)
        pages = self.cache.shape[0]
        turboquant_store(
            self.key, self.value, self.cache, torch.arange(problem.tokens, device=device), backend="reference"
        )
        self.table = draw.block_table(1, pages, draw.generator(device))
        self.boundaries = torch.tensor([0, problem.tokens], dtype=torch.int32, device=device)
        self.bytes_moved = nbytes(self.key, self.value) + problem.tokens * problem.h_kv * self.layout.record_bytes
        self.tolerances = {"key": ROUNDED, "value": ROUNDED}

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        arguments = (self.cache, self.table, self.boundaries, len(self.key), HEAD_DIM)
        key, value = turboquant_gather(*arguments, **outputs, backend=backend)
        return {"key": key, "value": value}

    def poisoned_outputs(self) -> Outputs:
        return {"key": nan_like(self.key), "value": nan_like(self.value)}

    def reference(self) -> Results:
        return self.compute(self.chosen, "reference")

    def read(self, results: Results) -> Results:
        return results
