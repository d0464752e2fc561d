"""Index logits, contiguous and paged, and top-k."""

from __future__ import annotations

import torch

from flashlatte import kv_cache
from flashlatte.bench.problems import IndexLogits, PagedIndexLogits, TopK
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import Outputs, Results, Workload, spread
from flashlatte.ops.index_logits import index_logits, paged_index_logits
from flashlatte.ops.index_quantize import index_quantize
from flashlatte.ops.topk import topk
from flashlatte.runtime import dispatch
from flashlatte.testing.compare import Tolerance

HEAD_DIM, CACHE_FORMAT, KEY_BYTES = 128, "index_fp8", 132
COMPARED_ROWS = 32
# DeepGEMM's bound of the cosine difference; logits are about 0.05.
LOGITS = Tolerance(5e-4, 1e-3, 5e-6)
EQUAL = Tolerance(0.0, 0.0)


class IndexLogitsWorkload(Workload):
    def __init__(self, problem: IndexLogits, device: torch.device) -> None:
        rng = draw.generator(device)
        rows, keys, heads = problem.rows, problem.keys, problem.heads
        self.q = draw.normal((rows, heads, HEAD_DIM), torch.bfloat16, rng).to(torch.float8_e4m3fn)
        self.k = draw.normal((keys, HEAD_DIM), torch.bfloat16, rng).to(torch.float8_e4m3fn)
        self.k_scale = torch.rand(keys, generator=rng, device=device) + 0.5
        self.weights = draw.normal((rows, heads), torch.float32, rng)
        self.key_end = torch.arange(keys - rows + 1, keys + 1, dtype=torch.int32, device=device)
        self.key_start = torch.zeros_like(self.key_end)
        self.rows = spread(rows, COMPARED_ROWS, device)

        pairs = rows * (keys - rows) + rows * (rows + 1) // 2
        self.flops = 2 * heads * HEAD_DIM * pairs
        self.bytes_moved = self.q.numel() + keys * KEY_BYTES + 4 * pairs
        self.tolerances = {"logits": LOGITS}
        self.call = dispatch.Call(
            problem.operation, device, self.q.dtype, CACHE_FORMAT, head_dim=HEAD_DIM, h_q=problem.heads
        )

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        out = outputs["out"] if outputs else None
        arguments = (self.q, self.k, self.weights, self.key_start, self.key_end)
        return {"logits": index_logits(*arguments, k_scale=self.k_scale, clean=False, out=out, backend=backend)}

    def poisoned_outputs(self) -> Outputs:
        shape = (self.q.shape[0], self.k.shape[0])
        return {"out": torch.full(shape, torch.nan, device=self.q.device)}

    def check(self, results: Results) -> None:
        """What a query does not see is undefined."""
        column = torch.arange(self.k.shape[0], device=self.q.device)
        seen = column < self.key_end[self.rows].unsqueeze(1)
        super().check({"logits": results["logits"][self.rows].masked_fill(~seen, 0.0)})

    def compared(self, results: Results) -> Results:
        return results

    def reference(self) -> Results:
        arguments = (self.q[self.rows], self.k, self.weights[self.rows], self.key_start[self.rows])
        logits = index_logits(*arguments, self.key_end[self.rows], k_scale=self.k_scale, backend="reference")
        return {"logits": logits.masked_fill(logits.isneginf(), 0.0)}


class PagedIndexLogitsWorkload(Workload):
    def __init__(self, problem: PagedIndexLogits, device: torch.device) -> None:
        rng = draw.generator(device)
        batch, keys, next_n, heads = problem.batch, problem.keys, problem.next_n, problem.heads
        pages = -(-keys // problem.page_size)
        self.cache = kv_cache.allocate(CACHE_FORMAT, batch * pages, problem.page_size, device=device)
        every = torch.arange(batch * pages * problem.page_size, device=device)
        for slots in every.split(2**20):
            index_quantize(self.cache, slots, draw.normal((len(slots), HEAD_DIM), torch.bfloat16, rng))
        self.table = draw.block_table(batch, pages, rng)
        self.q = draw.normal((batch, next_n, heads, HEAD_DIM), torch.bfloat16, rng).to(torch.float8_e4m3fn)
        self.weights = draw.normal((batch * next_n, heads), torch.float32, rng)
        self.lengths = torch.full((batch, next_n), keys, dtype=torch.int32, device=device)
        self.width = keys
        self.requests = spread(batch, COMPARED_ROWS // next_n, device)

        self.flops = 2 * heads * HEAD_DIM * batch * next_n * keys
        self.bytes_moved = self.q.numel() + batch * keys * KEY_BYTES + 4 * batch * next_n * keys
        self.tolerances = {"logits": LOGITS}
        self.call = dispatch.Call(
            problem.operation, device, self.q.dtype, CACHE_FORMAT, problem.page_size, HEAD_DIM, h_q=heads
        )

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        out = outputs["out"] if outputs else None
        arguments = (self.q, self.cache, self.weights, self.lengths, self.table)
        logits = paged_index_logits(*arguments, max_keys=self.width, clean=False, out=out, backend=backend)
        return {"logits": logits}

    def poisoned_outputs(self) -> Outputs:
        return {"out": torch.full((self.weights.shape[0], self.width), torch.nan, device=self.q.device)}

    def compared(self, results: Results) -> Results:
        logits = results["logits"].unflatten(0, self.q.shape[:2])
        return {"logits": logits[self.requests].flatten(0, 1)}

    def reference(self) -> Results:
        chosen = self.requests
        weights = self.weights.unflatten(0, self.q.shape[:2])[chosen].flatten(0, 1)
        arguments = (self.q[chosen], self.cache, weights, self.lengths[chosen], self.table[chosen])
        return {"logits": paged_index_logits(*arguments, max_keys=self.width, backend="reference")}


class TopKWorkload(Workload):
    def __init__(self, problem: TopK, device: torch.device) -> None:
        rng = draw.generator(device)
        self.logits = draw.normal((problem.rows, problem.width), torch.float32, rng)
        self.k = problem.k
        self.rows = spread(problem.rows, COMPARED_ROWS, device)

        self.flops = None
        self.bytes_moved = 4 * problem.rows * (problem.width + problem.k)
        self.tolerances = {"indices": EQUAL}
        self.call = dispatch.Call(
            problem.operation, device, self.logits.dtype, rows=problem.rows, columns=problem.width, k=problem.k
        )

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        indices = topk(self.logits, self.k, indices=outputs["indices"] if outputs else None, backend=backend)
        assert isinstance(indices, torch.Tensor)
        return {"indices": indices}

    def poisoned_outputs(self) -> Outputs:
        shape = (self.logits.shape[0], self.k)
        return {"indices": torch.full(shape, -7, dtype=torch.int32, device=self.logits.device)}

    def compared(self, results: Results) -> Results:
        return {"indices": results["indices"][self.rows]}

    def reference(self) -> Results:
        indices = topk(self.logits[self.rows], self.k, backend="reference")
        assert isinstance(indices, torch.Tensor)
        return {"indices": indices}
