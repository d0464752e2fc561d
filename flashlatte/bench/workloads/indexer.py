"""Index logits, contiguous, paged and of candidate blocks, and top-k."""

from __future__ import annotations

from typing import Any

import torch

from flashlatte import kv_cache
from flashlatte.bench.problems import IndexLogits, PagedIndexLogits, SparseIndexLogits, TopK
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import EQUAL, Outputs, Results, Rows, Workload, spread
from flashlatte.ops.index_logits import index_logits, paged_index_logits, sparse_index_logits
from flashlatte.ops.index_quantize import index_quantize
from flashlatte.ops.topk import topk
from flashlatte.runtime import dispatch
from flashlatte.testing.compare import Tolerance

CACHE_FORMAT, SCALE_BYTES = "index_fp8", 4
LOGIT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COMPARED_ROWS = 32
# DeepGEMM's bound of the cosine difference; logits are about 0.05.
LOGITS = Tolerance(5e-4, 1e-3, 5e-6)
TOLERANCES = {"fp32": LOGITS, "bf16": Tolerance(5e-4, 2.01 / 128, 1e-5)}
# DeepSeek-V4.1's index keys.
BLOCKS_FORMAT = "index_mxfp4"


class IndexLogitsWorkload(Workload, problem=IndexLogits):
    def __init__(self, problem: IndexLogits, device: torch.device) -> None:
        rng = draw.generator(device)
        rows, keys, heads, head_dim = problem.rows, problem.keys, problem.heads, problem.head_dim
        self.q = draw.normal((rows, heads, head_dim), torch.bfloat16, rng).to(torch.float8_e4m3fn)
        self.k = draw.normal((keys, head_dim), torch.bfloat16, rng).to(torch.float8_e4m3fn)
        self.k_scale = torch.rand(keys, generator=rng, device=device) + 0.5
        self.weights = draw.normal((rows, heads), torch.float32, rng)
        self.key_end = torch.arange(keys - rows + 1, keys + 1, dtype=torch.int32, device=device)
        self.key_start = torch.zeros_like(self.key_end)
        if problem.ranges:
            self.key_start, self.key_end = (draw.integers(-keys // 4, keys, rows, rng) for _ in range(2))
            self.key_end += keys // 4
        self.chosen = spread(rows, COMPARED_ROWS, device)
        self.clean, self.dtype = problem.clean, LOGIT_DTYPES[problem.dtype]

        pairs = int((self.key_end.clamp(0, keys) - self.key_start.clamp(0, keys)).clamp_min(0).sum())
        self.flops = 2 * heads * head_dim * pairs
        self.bytes_moved = self.q.numel() + keys * (head_dim + SCALE_BYTES) + self.dtype.itemsize * pairs
        self.tolerances = {"logits": TOLERANCES[problem.dtype]}
        self.call = dispatch.CallSpec(
            problem.operation, device, self.q.dtype, CACHE_FORMAT, head_dim=head_dim, h_q=problem.heads
        )

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        arguments = (self.q[rows], self.k, self.weights[rows], self.key_start[rows], self.key_end[rows])
        options = {"k_scale": self.k_scale, "clean": self.clean, "dtype": self.dtype, "backend": backend}
        return {"logits": index_logits(*arguments, **options, **outputs)}

    def poisoned_outputs(self) -> Outputs:
        shape = (self.q.shape[0], self.k.shape[0])
        return {"out": torch.full(shape, torch.nan, dtype=self.dtype, device=self.q.device)}

    def defined(self, results: Results) -> Results:
        return {"logits": defined_logits(results["logits"], self.key_start, self.key_end, self.clean)}

    def reference(self) -> Results:
        logits = self.reference_logits()
        return {"logits": logits.masked_fill(logits.isneginf(), 0.0)}

    def reference_logits(self) -> torch.Tensor:
        """Of the chosen rows, -inf where a query has no key."""
        rows = (x[self.chosen] for x in (self.weights, self.key_start, self.key_end))
        return index_logits(self.q[self.chosen], self.k, *rows, k_scale=self.k_scale, backend="reference")


class PagedIndexLogitsWorkload(Workload, problem=PagedIndexLogits):
    def __init__(self, problem: PagedIndexLogits, device: torch.device) -> None:
        rng = draw.generator(device)
        batch, keys, next_n = problem.batch, problem.keys, problem.next_n
        heads, head_dim = problem.heads, problem.head_dim
        pages = -(-keys // problem.page_size)
        self.cache = kv_cache.allocate(CACHE_FORMAT, batch * pages, problem.page_size, head_dim=head_dim, device=device)
        every = torch.arange(batch * pages * problem.page_size, device=device)
        for slots in every.split(2**20):
            index_quantize(self.cache, slots, draw.normal((len(slots), head_dim), torch.bfloat16, rng))
        self.table = draw.block_table(batch, pages, rng)
        self.q = draw.normal((batch, next_n, heads, head_dim), torch.bfloat16, rng).to(torch.float8_e4m3fn)
        self.weights = draw.normal((batch * next_n, heads), torch.float32, rng)
        self.lengths = torch.full((batch, next_n), keys, dtype=torch.int32, device=device)
        if problem.varlen:
            self.lengths = draw.integers(0, keys + 1, batch * next_n, rng).view(batch, next_n)
        self.width = keys
        self.chosen = spread(batch, COMPARED_ROWS // next_n, device)  # requests
        self.clean, self.dtype = problem.clean, LOGIT_DTYPES[problem.dtype]

        pairs = int(self.lengths.sum())
        self.flops = 2 * heads * head_dim * pairs
        key_bytes = int(self.lengths.amax(1).sum()) * (head_dim + SCALE_BYTES)
        self.bytes_moved = self.q.numel() + key_bytes + self.dtype.itemsize * pairs
        self.tolerances = {"logits": TOLERANCES[problem.dtype]}
        self.call = dispatch.CallSpec(
            problem.operation, device, self.q.dtype, CACHE_FORMAT, problem.page_size, head_dim, h_q=heads
        )

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        arguments = (self.q, self.cache, self.weights, self.lengths, self.table)
        options = {"max_keys": self.width, "clean": self.clean, "dtype": self.dtype, "backend": backend}
        return {"logits": paged_index_logits(*arguments, **options, **outputs)}

    def poisoned_outputs(self) -> Outputs:
        shape = (self.weights.shape[0], self.width)
        return {"out": torch.full(shape, torch.nan, dtype=self.dtype, device=self.q.device)}

    def defined(self, results: Results) -> Results:
        end = self.lengths.flatten()
        return {"logits": defined_logits(results["logits"], torch.zeros_like(end), end, self.clean)}

    def compared(self, results: Results) -> Results:
        return {"logits": self.tokens_of_chosen(results["logits"])}

    def reference(self) -> Results:
        logits = self.reference_logits()
        return {"logits": logits.masked_fill(logits.isneginf(), 0.0)}

    def reference_logits(self) -> torch.Tensor:
        """Of the chosen requests, -inf where a query has no key."""
        q, lengths, table = (x[self.chosen] for x in (self.q, self.lengths, self.table))
        arguments = (q, self.cache, self.tokens_of_chosen(self.weights), lengths, table)
        return paged_index_logits(*arguments, max_keys=self.width, backend="reference")

    def tokens_of_chosen(self, rows: torch.Tensor) -> torch.Tensor:
        """Those of ``rows``, one for each token of each request, that belong to the chosen requests."""
        return rows.unflatten(0, self.q.shape[:2])[self.chosen].flatten(0, 1)


def defined_logits(logits: torch.Tensor, start: torch.Tensor, end: torch.Tensor, clean: bool) -> torch.Tensor:
    """Zeros outside each row's range of keys; NaN there where the call should have left -inf and did not."""
    key = torch.arange(logits.shape[1], device=logits.device)
    masked = (key < start.unsqueeze(1)) | (key >= end.unsqueeze(1))
    if clean:
        logits = logits.masked_fill(masked & ~logits.isneginf(), torch.nan)
        masked &= logits.isneginf()
    return logits.masked_fill(masked, 0.0)


class TopKWorkload(Workload, problem=TopK):
    def __init__(self, problem: TopK, device: torch.device) -> None:
        rng = draw.generator(device)
        self.logits = row_values(draw.normal((problem.rows, problem.width), torch.float32, rng), problem.values)
        self.k, self.page_size, self.table = problem.k, problem.page_size or None, None
        if problem.page_size:
            self.table = draw.block_table(problem.rows, -(-problem.width // problem.page_size), rng)
        self.chosen = spread(problem.rows, COMPARED_ROWS, device)

        self.bytes_moved = 4 * problem.rows * (problem.width + problem.k)
        self.tolerances = {"indices": EQUAL}
        self.call = dispatch.CallSpec(
            problem.operation, device, self.logits.dtype, rows=problem.rows, columns=problem.width, k=problem.k
        )

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        table = None if self.table is None else self.table[rows]
        pages = {"block_table": table, "page_size": self.page_size}
        indices = topk(self.logits[rows], self.k, **pages, **outputs, backend=backend)
        assert isinstance(indices, torch.Tensor)
        return {"indices": indices}

    def poisoned_outputs(self) -> Outputs:
        shape = (self.logits.shape[0], self.k)
        return {"indices": torch.full(shape, -7, dtype=torch.int32, device=self.logits.device)}


def row_values(normal: torch.Tensor, values: str) -> torch.Tensor:
    """Rows of one of ``ROW_VALUES``, made from normal ones."""
    if values == "equal":
        return torch.full_like(normal, 0.25)
    if values == "mostly-zero":
        return normal.masked_fill(normal < 1.3 * draw.STD, 0.0)
    if values == "concentrated":
        return 7.0 * (1 + 1e-3 * normal.sigmoid())
    if values == "sorted":
        return normal.sort(dim=1).values
    if values == "subnormal":
        return (normal * 3000).int().view(torch.float32)
    return (normal * 3000).round() / 300 if values == "few-distinct" else normal


class SparseIndexLogitsWorkload(Workload, problem=SparseIndexLogits):
    def __init__(self, problem: SparseIndexLogits, device: torch.device) -> None:
        rng = draw.generator(device)
        rows, blocks, self.block_size = problem.rows, problem.blocks, problem.block_size
        heads, head_dim, page_size = problem.heads, problem.head_dim, problem.page_size
        pages = -(-problem.keys // page_size)
        self.cache = kv_cache.allocate(BLOCKS_FORMAT, pages, page_size, head_dim=head_dim, device=device)
        for slots in torch.arange(pages * page_size, device=device).split(2**20):
            index_quantize(self.cache, slots, draw.normal((len(slots), head_dim), torch.bfloat16, rng))
        self.q = draw.normal((rows, heads, head_dim), torch.bfloat16, rng)
        self.weights = draw.normal((rows, heads), torch.float32, rng)
        first = draw.integers(0, pages * page_size // self.block_size, rows * blocks, rng).view(rows, blocks)
        self.first_key = (first * self.block_size).int()
        self.num_keys = torch.full_like(self.first_key, self.block_size)
        self.dtype = LOGIT_DTYPES[problem.dtype]
        self.chosen = spread(rows, COMPARED_ROWS, device)

        columns = blocks * self.block_size
        bytes_per_key = kv_cache.get_format(BLOCKS_FORMAT, head_dim).bytes_per_token
        self.flops = 2 * heads * head_dim * rows * columns
        distinct = int(self.first_key.unique().numel()) * self.block_size
        self.bytes_moved = 2 * self.q.numel() + distinct * bytes_per_key + self.dtype.itemsize * rows * columns
        self.tolerances = {"logits": TOLERANCES[problem.dtype]}
        self.call = dispatch.CallSpec(
            problem.operation, device, self.q.dtype, BLOCKS_FORMAT, page_size, head_dim=head_dim, h_q=heads
        )

    def compute(self, rows: Rows, backend: str, **options: Any) -> Results:
        blocks = (self.first_key[rows], self.num_keys[rows])
        options = {"block_size": self.block_size, "dtype": self.dtype, "backend": backend, **options}
        return {"logits": sparse_index_logits(self.q[rows], self.cache, self.weights[rows], *blocks, **options)}

    def poisoned_outputs(self) -> Outputs:
        shape = (self.q.shape[0], self.first_key.shape[1] * self.block_size)
        return {"out": torch.full(shape, torch.nan, dtype=self.dtype, device=self.q.device)}

    def defined(self, results: Results) -> Results:
        logits = results["logits"]
        start = torch.zeros(logits.shape[0], dtype=torch.int32, device=logits.device)
        return {"logits": defined_logits(logits, start, start + logits.shape[1], clean=True)}

    def reference(self) -> Results:
        return self.compute(self.chosen, "reference", dtype=torch.float32)
