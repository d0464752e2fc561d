"""The form "direct": queries and partial results are read in the other GPUs' memory, by the kernels that need them.

Two barriers a call keep writers from readers. The first comes after each rank has written its queries, the second after
it has written its partial results. The next call may overwrite both: a rank writes queries after this call's second
barrier, which all came to when they had gathered; and partial results after the next call's first barrier, which all
came to when they had merged. Queries and results lie in pools of their own: those of a next call of other shapes would
else be queries where the others still read results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte.distributed.merge import Partial
from flashlatte.distributed.peer_memory import PeerMemory, Shared
from flashlatte.ops.merge_states import merge_states

# Beyond so many bytes a rank, where buffers that stay would cost more memory than they save time, the default form is
# a collective.
MAX_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Direct:
    """A call's part of the peers' memory.

    Attributes:
        queries: [T, h, dim] of every rank; None where each has those of all heads.
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
        queries = None if all_heads else memory.take((tuple(q.shape), q.dtype), pool="queries")
        results = memory.take(((tokens, heads, dim), q.dtype), ((tokens, heads), torch.float32), pool="results")
        return cls(queries, results, memory.group.rank())

    def gather(self, q: torch.Tensor) -> torch.Tensor:
        """All heads' queries [T, H, dim], of which q are this rank's, or all."""
        if self.queries is None:
            self.results.barrier()
            return q
        (queries,) = self.queries.parts
        queries[self.rank].copy_(q)
        self.results.barrier()
        return torch.cat(queries, dim=1)

    @property
    def partial(self) -> Partial:
        outs, lses = self.results.parts
        return Partial(outs[self.rank], lses[self.rank], None)

    def merge(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out [T, h, d] and lse [T, h] over the keys of all ranks, of this rank's heads or of all."""
        self.results.barrier()
        outs, lses = self.results.parts
        if self.queries is not None:
            outs, lses = ([x.chunk(len(x_by_rank), 1)[self.rank] for x in x_by_rank] for x_by_rank in (outs, lses))
        return merge_states(outs, lses)
