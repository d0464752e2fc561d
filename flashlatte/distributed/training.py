"""Training steps over several ranks: the tokens of a batch divided among them, or the heads of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from flashlatte.distributed import collectives
from flashlatte.distributed.agreement import Agreement, as_group
from flashlatte.distributed.prefill import zigzag_blocks
from flashlatte.runtime import checks


class ContextShard:
    """A rank's share of the tokens of a training batch (context parallelism); ``ranks`` of ``forward_training``.

    Each rank computes the queries of its tokens. Latents and index keys of all tokens are gathered, since every rank
    has queries that attend to most of them, and their gradients are reduce-scattered in float32. A rank's memory
    therefore holds the latents of the whole batch: 576 elements a token in DeepSeek-V3, which is less than the queries
    of its own tokens.

    Ranks may have different numbers of tokens. One object can be used for every step with ``tokens`` tokens.

    Args:
        tokens: tokens of the batch on all ranks.
        group: a process group of torch.distributed; all ranks if None.
        zigzag: divide the batch into 2 · size blocks of equal size (± 1 token), and give rank r the blocks r and
            2 · size - 1 - r, so that all ranks have about the same work; False: size contiguous blocks.
        timeout: how long a rank waits for the others to create the object, and at a step with other arguments than
            before.

    Attributes:
        tokens, group: as given.
        blocks: this rank's tokens, in order.

    Raises:
        TypeError, ValueError: fewer tokens than blocks; arguments that differ between ranks.
        RuntimeError: a rank does not create the object within ``timeout``.
    """

    heads_group: dist.ProcessGroup | None = None

    def __init__(
        self,
        tokens: int,
        group: dist.ProcessGroup | None = None,
        *,
        zigzag: bool = True,
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        self.group = group = as_group(group)
        self._agreement = Agreement(group, timeout)
        self._agreement.check("ContextShard", {"tokens": tokens, "zigzag": zigzag})
        size = group.size()
        least = 2 * size if checks.flag("zigzag", zigzag) else size
        if checks.positive_int("tokens", tokens) < least:
            raise ValueError(f"tokens must be at least the {least} blocks of {size} ranks, got {tokens}")
        self.tokens = tokens
        blocks = [_blocks(tokens, rank, size, zigzag) for rank in range(size)]
        self.blocks = blocks[group.rank()]
        counts = [sum(map(len, each)) for each in blocks]
        self._rows_per_rank = max(counts)
        # The row of each token among the ranks' padded rows.
        order = torch.empty(tokens, dtype=torch.int64)
        for rank, each in enumerate(blocks):
            first = rank * self._rows_per_rank
            order[_indices(each)] = torch.arange(first, first + counts[rank])
        self._order = order

    @property
    def indices(self) -> torch.Tensor:
        """int64 [n] on the CPU: this rank's tokens."""
        return _indices(self.blocks)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor [tokens, …] of the whole batch."""
        if x.shape[0] != self.tokens:
            raise ValueError(f"x must have {self.tokens} rows, one for each token, got shape {list(x.shape)}")
        return torch.cat([x[block.start : block.stop] for block in self.blocks])

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [tokens, …] of the whole batch from each rank's rows [n, …]. Their gradients are summed over ranks."""
        count = sum(map(len, self.blocks))
        if x.shape[0] != count:
            raise ValueError(f"x must have {count} rows, one for each token of this rank, got shape {list(x.shape)}")
        if self._order.device != x.device:
            self._order = self._order.to(x.device)
        return _Gather.apply(x, self.group, self._order, self._rows_per_rank)

    def check(self, facts: Mapping[str, object]) -> None:
        """Raise ValueError on all ranks unless every rank passes the same facts about a step."""
        self._agreement.check("forward_training", facts)

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` unchanged, since each rank has all heads."""
        return x

    def mean(self, loss: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
        """The mean over the rows of all ranks, the same on every rank; 0 without rows.

        Its gradient is that of this rank's term, loss / Σ num_rows. Sum the gradients of parameters over the ranks (for
        a wrapper that averages them over these ranks, multiply the result by their number).

        Args:
            loss: the sum over this rank's rows, as ``indexer_loss`` and ``forward_training`` return it.
            num_rows: int64, number of rows in the sum.
        """
        total = collectives.all_reduce(num_rows.clone(), self.group)
        return _Sum.apply(loss / total.clamp_min(1), self.group)


class HeadRanks:
    """``TrainingRanks`` for heads divided over the ranks of ``group``; with ``shard``, tokens are divided as well."""

    def __init__(self, group: dist.ProcessGroup, agreement: Agreement, shard: ContextShard | None = None) -> None:
        self.heads_group, self._agreement = group, agreement
        self.shard = shard
        self.tokens = None if shard is None else shard.tokens
        self.blocks = None if shard is None else shard.blocks

    def check(self, facts: Mapping[str, object]) -> None:
        # The ranks of ``heads_group`` have the same tokens, those of the shard the same heads.
        common = {name: fact for name, fact in facts.items() if name != "heads"}
        blocks = None if self.blocks is None else tuple(self.blocks)
        self._agreement.check("forward_training", common | {"blocks": blocks})
        if self.shard is not None:
            self.shard.check(facts)

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        return _SumOfGradients.apply(x, self.heads_group)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.shard is None else self.shard.gather(x)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks' heads."""
        return _Sum.apply(x, self.heads_group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, order: torch.Tensor, rows_per_rank: int
    ) -> torch.Tensor:
        ctx.group, ctx.rows, ctx.rows_per_rank = group, x.shape[0], rows_per_rank
        ctx.save_for_backward(order)
        padded = x.new_zeros(rows_per_rank, *x.shape[1:])
        padded[: x.shape[0]] = x
        return collectives.all_gather(padded, group)[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        padded = gradient.new_zeros(ctx.group.size() * ctx.rows_per_rank, *gradient.shape[1:], dtype=wide)
        padded[order] = gradient.to(wide)
        return collectives.reduce_scatter(padded, ctx.group)[: ctx.rows].to(gradient.dtype), None, None, None


class _Sum(torch.autograd.Function):
    """The sum over ranks. Since every rank computes the same from it, its gradient is that of each rank's term."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return collectives.all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _SumOfGradients(torch.autograd.Function):
    """Identity in the forward pass; the backward pass sums the ranks' gradients in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.to(wide, copy=True, memory_format=torch.contiguous_format)
        return collectives.all_reduce(total, ctx.group).to(gradient.dtype), None


def _blocks(tokens: int, rank: int, size: int, zigzag: bool) -> tuple[range, ...]:
    if zigzag:
        return zigzag_blocks(tokens, rank, size)
    return (range(tokens * rank // size, tokens * (rank + 1) // size),)


def _indices(blocks: tuple[range, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(block.start, block.stop) for block in blocks])
