"""Index logits of candidate blocks."""

from __future__ import annotations

import torch

from flashlatte import kv_cache
from flashlatte.bench.problems import SparseIndexLogits
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import Outputs, Results, Workload, spread
from flashlatte.bench.workloads.indexer import COMPARED_ROWS, LOGIT_DTYPES, TOLERANCES, defined_logits
from flashlatte.ops.index_logits import sparse_index_logits
from flashlatte.ops.index_quantize import index_quantize
from flashlatte.runtime import dispatch

# DeepSeek-V4.1's index keys.
CACHE_FORMAT = "index_mxfp4"


class SparseIndexLogitsWorkload(Workload):
    def __init__(self, problem: SparseIndexLogits, device: torch.device) -> None:
        rng = draw.generator(device)
        rows, blocks, self.block_size = problem.rows, problem.blocks, problem.block_size
        heads, head_dim, page_size = problem.heads, problem.head_dim, problem.page_size
        pages = -(-problem.keys // page_size)
        self.cache = kv_cache.allocate(CACHE_FORMAT, pages, page_size, head_dim=head_dim, device=device)
        for slots in torch.arange(pages * page_size, device=device).split(2**20):
            index_quantize(self.cache, slots, draw.normal((len(slots), head_dim), torch.bfloat16, rng))
        self.q = draw.normal((rows, heads, head_dim), torch.bfloat16, rng)
        self.weights = draw.normal((rows, heads), torch.float32, rng)
        first = draw.integers(0, pages * page_size // self.block_size, rows * blocks, rng).view(rows, blocks)
        self.first_key = (first * self.block_size).int()
        self.num_keys = torch.full_like(self.first_key, self.block_size)
        self.dtype = LOGIT_DTYPES[problem.dtype]
        self.rows = spread(rows, COMPARED_ROWS, device)

        columns = blocks * self.block_size
        bytes_per_key = kv_cache.get_format(CACHE_FORMAT, head_dim).bytes_per_token
        self.flops = 2 * heads * head_dim * rows * columns
        distinct = int(self.first_key.unique().numel()) * self.block_size
        self.bytes_moved = 2 * self.q.numel() + distinct * bytes_per_key + self.dtype.itemsize * rows * columns
        self.tolerances = {"logits": TOLERANCES[problem.dtype]}
        self.call = dispatch.CallSpec(
            problem.operation, device, self.q.dtype, CACHE_FORMAT, page_size, head_dim=head_dim, h_q=heads
        )

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        arguments = (self.q, self.cache, self.weights, self.first_key, self.num_keys)
        options = {"block_size": self.block_size, "dtype": self.dtype, "backend": backend}
        return {"logits": sparse_index_logits(*arguments, **options, **(outputs or {}))}

    def poisoned_outputs(self) -> Outputs:
        shape = (self.q.shape[0], self.first_key.shape[1] * self.block_size)
        return {"out": torch.full(shape, torch.nan, dtype=self.dtype, device=self.q.device)}

    def defined(self, results: Results) -> Results:
        logits = results["logits"]
        start = torch.zeros(logits.shape[0], dtype=torch.int32, device=logits.device)
        return {"logits": defined_logits(logits, start, start + logits.shape[1], clean=True)}

    def compared(self, results: Results) -> Results:
        return {"logits": results["logits"][self.rows]}

    def reference(self) -> Results:
        blocks = (self.first_key[self.rows], self.num_keys[self.rows])
        arguments = (self.q[self.rows], self.cache, self.weights[self.rows], *blocks)
        return {"logits": sparse_index_logits(*arguments, block_size=self.block_size, backend="reference")}
