"""The form "direct": one kernel writes queries to the peers' memory, and one reads partial outputs from it.

Each call has two barriers: one after each rank has written its queries to all ranks, and one after it has written its
partial outputs. The next call may then overwrite both. It writes queries after this call's second barrier, when all
ranks have read theirs, and partial outputs after its own first barrier, when all ranks have merged. Queries and outputs
have separate pools, since otherwise a call of other shapes could write queries where others still read outputs.

Each rank starts with the memory of the next rank and ends with its own, which spreads traffic over all NVLink links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashlatte.distributed.merge import RankPartial
from flashlatte.distributed.peer_memory import PeerMemory, SharedTensors
from flashlatte.distributed.push import push
from flashlatte.ops.merge_states import merge_states

# Above this size per rank the default form is a collective, since buffers are never freed.
MAX_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Direct:
    """The peer buffers of a call.

    Attributes:
        queries: queries of all heads [T, H, dim] on every rank; None if each rank has them already.
        results: partial out [T, H, d] and lse float32 [T, H] of every rank, for the H heads of all ranks.
        rank: this rank.
    """

    queries: SharedTensors | None
    results: SharedTensors
    rank: int

    @classmethod
    def take(cls, memory: PeerMemory, q: torch.Tensor, heads: int, dim: int, all_heads: bool) -> Direct:
        """The buffers for queries q [T, h, dim_q] of this rank and outputs [T, heads, dim].

        Args:
            all_heads: q has all heads, and every rank receives the results of all heads.
        """
        tokens = q.shape[0]
        queries = None if all_heads else memory.take(((tokens, heads, q.shape[2]), q.dtype), pool="queries")
        results = memory.take(((tokens, heads, dim), q.dtype), ((tokens, heads), torch.float32), pool="results")
        return cls(queries, results, memory.group.rank())

    def gather(self, q: torch.Tensor) -> torch.Tensor:
        """Queries [T, H, dim] of all heads, gathered from the ranks' q."""
        if self.queries is None:
            self.results.barrier()
            return q
        (queries,) = self.queries.parts
        push(q, self._own_heads(queries))
        self.results.barrier()
        return queries[self.rank]

    @property
    def partial(self) -> RankPartial:
        outs, lses = self.results.parts
        return RankPartial(outs[self.rank], lses[self.rank], None)

    def merge(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out [T, h, d] and lse [T, h] over the keys of all ranks, for this rank's heads or for all."""
        self.results.barrier()
        outs, lses = self.results.parts
        if self.queries is None:  # merge in the same order on all ranks, for bitwise equal results
            return merge_states(outs, lses)
        return merge_states(self._own_heads(outs), self._own_heads(lses))

    def _own_heads(self, by_rank: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's heads in the [T, H, …] of every rank, starting with the next rank."""
        size, rank = len(by_rank), self.rank
        return [x.chunk(size, 1)[rank] for x in (*by_rank[rank + 1 :], *by_rank[: rank + 1])]
