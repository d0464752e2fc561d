"""Index logits and their top-k in one call, contiguous and paged."""

from __future__ import annotations

import torch

from flashlatte.bench.problems import IndexSelect, PagedIndexSelect
from flashlatte.bench.workloads.base import Outputs, Results, Workload
from flashlatte.bench.workloads.indexer import LOGITS, IndexLogitsWorkload, PagedIndexLogitsWorkload
from flashlatte.ops.index_logits import index_logits, paged_index_logits
from flashlatte.ops.index_select import index_select, paged_index_select

POISON = -7


class IndexSelectWorkload(Workload):
    def __init__(self, problem: IndexSelect, device: torch.device) -> None:
        self.data = IndexLogitsWorkload(problem.logits, device)
        self.k, self.workspace_bytes = problem.k, problem.workspace_mib * 2**20
        self.flops, self.call = self.data.flops, self.data.call
        self.bytes_moved = self.data.bytes_moved + 4 * problem.logits.rows * problem.k
        self.tolerances = {"logits": LOGITS}

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        data = self.data
        ranges = data.key_start, data.key_end
        options = {"k_scale": data.k_scale, "workspace_bytes": self.workspace_bytes, "backend": backend}
        indices = index_select(data.q, data.k, data.weights, *ranges, self.k, **options, **(outputs or {}))
        return {"indices": indices}

    def poisoned_outputs(self) -> Outputs:
        return {"indices": poisoned_indices(self.data, self.k)}

    def compared(self, results: Results) -> Results:
        indices = results["indices"][self.data.rows].long()
        begin = self.data.key_start[self.data.rows].clamp_min(0).unsqueeze(1)
        return {"logits": chosen_logits(self.logits(), torch.where(indices >= 0, indices + begin, indices))}

    def reference(self) -> Results:
        return {"logits": largest(self.logits(), self.k)}

    def logits(self) -> torch.Tensor:
        data = self.data
        rows = (x[data.rows] for x in (data.weights, data.key_start, data.key_end))
        return index_logits(data.q[data.rows], data.k, *rows, k_scale=data.k_scale, backend="reference")


class PagedIndexSelectWorkload(Workload):
    def __init__(self, problem: PagedIndexSelect, device: torch.device) -> None:
        self.data = PagedIndexLogitsWorkload(problem.logits, device)
        self.k, self.page_size = problem.k, problem.logits.page_size
        self.flops, self.call = self.data.flops, self.data.call
        self.bytes_moved = self.data.bytes_moved + 4 * self.data.weights.shape[0] * problem.k
        self.tolerances = {"logits": LOGITS}
        # Each page belongs to one request, at one index of its table.
        table = self.data.table
        self.page_index = torch.empty(table.numel(), dtype=torch.int64, device=device)
        self.page_index[table.flatten().long()] = torch.arange(table.shape[1], device=device).repeat(table.shape[0])

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        data = self.data
        arguments = (data.q, data.cache, data.weights, data.lengths, data.table)
        return {"slots": paged_index_select(*arguments, self.k, slots=True, backend=backend, **(outputs or {}))}

    def poisoned_outputs(self) -> Outputs:
        return {"indices": poisoned_indices(self.data, self.k)}

    def compared(self, results: Results) -> Results:
        slots = results["slots"].unflatten(0, self.data.q.shape[:2])[self.data.requests].flatten(0, 1).long()
        exists = (slots >= 0) & (slots < len(self.page_index) * self.page_size)
        page = torch.where(exists, slots, 0) // self.page_size
        positions = torch.where(exists, self.page_index[page] * self.page_size + slots % self.page_size, slots)
        return {"logits": chosen_logits(self.logits(), positions)}

    def reference(self) -> Results:
        return {"logits": largest(self.logits(), self.k)}

    def logits(self) -> torch.Tensor:
        data, chosen = self.data, self.data.requests
        weights = data.weights.unflatten(0, data.q.shape[:2])[chosen].flatten(0, 1)
        arguments = (data.q[chosen], data.cache, weights, data.lengths[chosen], data.table[chosen])
        return paged_index_logits(*arguments, max_keys=data.width, backend="reference")


def poisoned_indices(data: IndexLogitsWorkload | PagedIndexLogitsWorkload, k: int) -> torch.Tensor:
    return torch.full((data.weights.shape[0], k), POISON, dtype=torch.int32, device=data.q.device)


def chosen_logits(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The logits at these positions in descending order, 0 for -1, NaN for repeated ones and those out of range."""
    at = positions.sort(dim=1).values
    inside = (at >= 0) & (at < logits.shape[1]) & (at != at.roll(1, dims=1))
    found = logits.gather(1, at.clamp(0, logits.shape[1] - 1)).masked_fill(~inside, torch.nan)
    found = found.masked_fill(found.isneginf(), torch.nan).masked_fill(at == -1, -torch.inf)
    return _without_infinity(found.sort(dim=1, descending=True).values)


def largest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The ``k`` largest in descending order, 0 where a row has fewer."""
    count = min(k, logits.shape[1])
    found = torch.nn.functional.pad(logits.topk(count, dim=1).values, (0, k - count), value=-torch.inf)
    return _without_infinity(found)


def _without_infinity(logits: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(logits.isneginf(), 0.0)
