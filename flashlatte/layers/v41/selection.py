"""The groups that indexers select in a step, and the candidate blocks of the two-level indexer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from flashlatte.layers.v4.cache import V4Cache
from flashlatte.layers.v4.group_step import SelectedGroups
from flashlatte.layers.v4.step import V4Groups
from flashlatte.layers.v41.config import CandidateConfig
from flashlatte.ops.index_convert import index_convert
from flashlatte.ops.index_logits import paged_index_logits, sparse_index_logits
from flashlatte.ops.index_select import api as index_select_api
from flashlatte.ops.topk import topk


@dataclass
class SharedSelections:
    """The selections of the indexers of one step, for later layers. Create one for each step.

    Attributes:
        caches: the caches of the layers that have stored groups.
        groups: the selected groups, by the layer that selected them.
        blocks: int32 [T, num_blocks], candidate blocks in ascending order, then -1, by the layer that published them.
    """

    caches: dict[int, V4Cache] = field(default_factory=dict)
    groups: dict[int, SelectedGroups] = field(default_factory=dict)
    blocks: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class IndexQueries:
    """Index queries of a step's tokens, and the keys that they are compared to.

    Attributes:
        q: [T, H, head_dim], in the dtype that the keys' format takes.
        weights: float32 [T, H].
        keys: [pages, page_size, 1, width], one index key for each group.
        groups: the step's groups.
        topk: maximum number of groups that a query selects.
        backend: backend of the operations; None selects one.
        workspace_bytes: maximum bytes of the logits that are computed at once.
    """

    q: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor
    groups: V4Groups
    topk: int
    backend: str | None
    workspace_bytes: int = index_select_api.WORKSPACE_BYTES

    def select_and_publish(self, candidates: CandidateConfig) -> tuple[SelectedGroups, torch.Tensor]:
        """Select groups among all, and the blocks with the highest scores. A block's score is that of its best group;
        the block of the newest group always is a candidate.

        Returns:
            The selected groups, and int32 [T, num_blocks], blocks in ascending order, then -1.
        """
        size, groups = candidates.block_size, self.groups
        indices = self._indices(self.topk)
        blocks = self._indices(candidates.num_blocks)
        for rows in self._chunks(groups.table.shape[1] * groups.page_size):
            counts = groups.num_visible[rows]
            logits = paged_index_logits(
                self.q[rows].unsqueeze(1),
                self.keys,
                self.weights[rows],
                counts,
                groups.token_table[rows],
                backend=self.backend,
            )
            topk(logits, self.topk, end=counts, indices=indices[rows], backend=self.backend)
            scores = functional.pad(logits, (0, -logits.shape[1] % size), value=-math.inf)
            scores = scores.unflatten(1, (-1, size)).amax(dim=2)  # [n, blocks]
            newest = ((counts - 1).clamp_min(0) // size).long().unsqueeze(1)
            scores.scatter_(1, newest, math.inf)
            topk(scores, candidates.num_blocks, end=-(-counts // size), indices=blocks[rows], backend=self.backend)
        return self._selected(indices, groups.num_visible.clamp_max(self.topk)), blocks

    def select_within(self, candidates: CandidateConfig, blocks: torch.Tensor) -> SelectedGroups:
        """Select groups among the candidate ``blocks`` [T, num_blocks] of each query; scores only those."""
        groups, indices = self.groups, self._indices(self.topk)
        counts = torch.empty_like(groups.num_visible)
        # Keys of a page are adjacent: a block is scored in parts that do not cross pages.
        size = math.gcd(candidates.block_size, groups.page_size)
        offsets = torch.arange(0, candidates.block_size, size, device=blocks.device, dtype=torch.int32)
        for rows in self._chunks(candidates.num_blocks * candidates.block_size):
            first = blocks[rows].unsqueeze(2) * candidates.block_size + offsets
            first = first.masked_fill(blocks[rows].unsqueeze(2) < 0, -1).flatten(1)  # [n, parts]
            num_keys = (groups.num_visible[rows].unsqueeze(1) - first).clamp(0, size).masked_fill(first < 0, 0)
            slots = index_convert(first, groups.token_table[rows], groups.page_size, backend=self.backend)
            logits = sparse_index_logits(
                self.q[rows], self.keys, self.weights[rows], slots, num_keys, block_size=size, backend=self.backend
            )
            # Blocks ascend, so that visible keys are the first columns and columns ascend with positions.
            columns_in_use = num_keys.sum(dim=1, dtype=torch.int32)
            columns = topk(logits, self.topk, end=columns_in_use, backend=self.backend)
            # When kernels are only collected for a GPU, columns are not computed.
            part = (columns // size).clamp(0, first.shape[1] - 1)
            positions = first.gather(1, part.long()) + columns % size
            indices[rows] = positions.where(columns >= 0, -1)
            counts[rows] = columns_in_use.clamp_max(self.topk)
        return self._selected(indices, counts)

    def _chunks(self, columns: int) -> Iterator[slice]:
        """Slices of the tokens whose logits, of this many columns, fit the workspace."""
        tokens = self.q.shape[0]
        at_a_time = max(1, self.workspace_bytes // (index_select_api.LOGIT_BYTES * max(columns, 1)))
        for begin in range(0, tokens, at_a_time):
            yield slice(begin, min(begin + at_a_time, tokens))

    def _indices(self, columns: int) -> torch.Tensor:
        return torch.empty(self.q.shape[0], columns, dtype=torch.int32, device=self.q.device)

    def _selected(self, indices: torch.Tensor, counts: torch.Tensor) -> SelectedGroups:
        return SelectedGroups(indices, counts, self.groups, self.backend)
