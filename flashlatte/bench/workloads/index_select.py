"""Index logits and their top-k in one call, contiguous and paged."""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.bench.problems import IndexSelect, PagedIndexSelect
from flashlatte.bench.workloads.base import Outputs, Results, Rows, Workload
from flashlatte.bench.workloads.indexer import LOGITS, IndexLogitsWorkload, PagedIndexLogitsWorkload
from flashlatte.ops.index_select import index_select, paged_index_select

POISON = -7


class IndexSelectWorkload(Workload, problem=IndexSelect):
    def __init__(self, problem: IndexSelect, device: torch.device) -> None:
        self.data = IndexLogitsWorkload(problem.logits, device)
        self.k, self.workspace_bytes = problem.k, problem.workspace_mib * 2**20
        self.flops, self.call = self.data.flops, self.data.call
        self.bytes_moved = self.data.bytes_moved + 4 * problem.logits.rows * problem.k
        self.tolerances = {"logits": LOGITS}

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        data = self.data
        ranges = data.key_start, data.key_end
        options = {"k_scale": data.k_scale, "workspace_bytes": self.workspace_bytes, "backend": backend}
        return {"indices": index_select(data.q, data.k, data.weights, *ranges, self.k, **options, **outputs)}

    def poisoned_outputs(self) -> Outputs:
        return {"indices": poisoned_indices(self.data, self.k)}

    def compared(self, results: Results) -> Results:
        data = self.data
        indices = results["indices"][data.chosen].long()
        begin = data.key_start[data.chosen].clamp_min(0).unsqueeze(1)
        positions = torch.where(indices >= 0, indices + begin, indices)
        return {"logits": chosen_logits(data.reference_logits(), positions)}

    def reference(self) -> Results:
        return {"logits": largest(self.data.reference_logits(), self.k)}


class PagedIndexSelectWorkload(Workload, problem=PagedIndexSelect):
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

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        data = self.data
        arguments = (data.q, data.cache, data.weights, data.lengths, data.table)
        return {"slots": paged_index_select(*arguments, self.k, slots=True, backend=backend, **outputs)}

    def poisoned_outputs(self) -> Outputs:
        return {"indices": poisoned_indices(self.data, self.k)}

    def compared(self, results: Results) -> Results:
        slots = self.data.tokens_of_chosen(results["slots"]).long()
        exists = (slots >= 0) & (slots < len(self.page_index) * self.page_size)
        page = torch.where(exists, slots, 0) // self.page_size
        positions = torch.where(exists, self.page_index[page] * self.page_size + slots % self.page_size, slots)
        return {"logits": chosen_logits(self.data.reference_logits(), positions)}

    def reference(self) -> Results:
        return {"logits": largest(self.data.reference_logits(), self.k)}


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
