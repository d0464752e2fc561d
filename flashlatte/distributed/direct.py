"""The form "direct": one kernel writes queries into the other GPUs' memory, and one reads partial results there.

Two barriers a call keep writers from readers. The first comes after each rank has written its queries to all, the
second after it has written its partial results. The next call may overwrite both: a rank writes queries after this
call's second barrier, which all came to when they had attended; and partial results after the next call's first
barrier, which all came to when they had merged. Queries and results lie in pools of their own: those of a next call of
other shapes would else be queries where the others still read results.

Every rank begins with the next one's memory and ends with its own: where all began with rank 0's, they would share its
links while the others' were idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashlatte.distributed.merge import Partial
from flashlatte.distributed.peer_memory import PeerMemory, Shared
from flashlatte.distributed.push import push
from flashlatte.ops.merge_states import merge_states

# Beyond so many bytes a rank, where buffers that stay would cost more memory than they save time, the default form is
# a collective.
MAX_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Direct:
    """A call's part of the peers' memory.

    Attributes:
        queries: of all heads [T, H, dim], for every rank to attend with; None where each has them anyway.
        results: out [T, H, d] and lse float32 [T, H] of every rank, H heads of all ranks together.
        rank: this one.
    """

    queries: Shared | None
    results: Shared
    rank: int

    @classmethod
    def take(cls, memory: PeerMemory, q: torch.Tensor, heads: int, dim: int, all_heads: bool) -> Direct:
        """For queries q [T, h, dim_q] of this rank and results of so many heads and numbers.

        Args:
            all_heads: q are of all heads, and the results of all are wanted.
        """
        tokens = q.shape[0]
        queries = None if all_heads else memory.take(((tokens, heads, q.shape[2]), q.dtype), pool="queries")
        results = memory.take(((tokens, heads, dim), q.dtype), ((tokens, heads), torch.float32), pool="results")
        return cls(queries, results, memory.group.rank())

    def gather(self, q: torch.Tensor) -> torch.Tensor:
        """All heads' queries [T, H, dim], of which q are this rank's, or all."""
        if self.queries is None:
            self.results.barrier()
            return q
        (queries,) = self.queries.parts
        push(q, self._own_heads(queries))
        self.results.barrier()
        return queries[self.rank]

    @property
    def partial(self) -> Partial:
        outs, lses = self.results.parts
        return Partial(outs[self.rank], lses[self.rank], None)

    def merge(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out [T, h, d] and lse [T, h] over the keys of all ranks, of this rank's heads or of all."""
        self.results.barrier()
        outs, lses = self.results.parts
        if self.queries is None:  # In one order, so that all ranks get the same bits.
            return merge_states(outs, lses)
        return merge_states(self._own_heads(outs), self._own_heads(lses))

    def _own_heads(self, by_rank: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's heads in [T, H, …] of every rank, the next rank's first."""
        size, rank = len(by_rank), self.rank
        return [x.chunk(size, 1)[rank] for x in (*by_rank[rank + 1 :], *by_rank[: rank + 1])]
