"""``PrefillRing``: causal attention of one long prompt with its tokens divided over ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from flashlatte.distributed.agreement import Agreement, as_group
from flashlatte.ops.dense_prefill import dense_prefill
from flashlatte.ops.merge_states import merge_states
from flashlatte.runtime import checks, gradients
from flashlatte.runtime.transfer import to_device

Expand = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Store = Callable[[torch.Tensor, torch.Tensor], object]


def zigzag_blocks(tokens: int, rank: int, size: int) -> tuple[range, range]:
    """The blocks ``rank`` and 2 · size - 1 - rank of a prompt in 2 · size blocks of equal size (± 1 token)."""
    count = 2 * size
    low, high = (range(tokens * i // count, tokens * (i + 1) // count) for i in (rank, count - 1 - rank))
    return low, high


class PrefillRing:
    """Ring attention: each rank's queries attend to all ranks' latents, which rotate in size - 1 exchanges.

    A prompt is split into 2 · size blocks, and rank r has the blocks r and 2 · size - 1 - r (zig-zag). Every rank then
    has the same work in every round. With the shard of a lower rank, all queries attend to its first block. With the
    shard of a higher rank, the queries of the second block attend to all of it. Only attention to a rank's own shard
    needs a mask: it is causal, as if the two blocks were contiguous.

    Ranks exchange latents (576 elements a token in DeepSeek-V3; keys and values of 128 heads are seventy times as many)
    and expand them locally, overlapped with the next exchange. A rank holds two shards of latents and the keys and
    values of one. Partial outputs are merged in float32. Results have no gradients.

    Args:
        group: a process group of torch.distributed; all ranks if None.
        timeout: how long a rank waits for the others at the first prompt of a new length.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: timedelta = timedelta(seconds=60)) -> None:
        group = as_group(group)
        self.group = group
        self._agreement = Agreement(group, timeout)

    def blocks(self, tokens: int, rank: int | None = None) -> tuple[range, range]:
        """The two blocks of a prompt of ``tokens`` tokens on a rank (this one if None); either may be empty.

        Raises:
            TypeError, ValueError: ``tokens`` below 0, or a rank outside of the group.
        """
        size, rank = self.group.size(), self.group.rank() if rank is None else rank
        if not 0 <= checks.integer("rank", rank) < size:
            raise ValueError(f"rank must be from 0 to {size - 1}, got {rank}")
        return zigzag_blocks(checks.positive_int("tokens", tokens, or_zero=True), rank, size)

    def positions(self, tokens: int, rank: int | None = None, device: torch.device | str | None = None) -> torch.Tensor:
        """int64 [n] on ``device``, positions of the prompt's tokens on a rank (this one if None), in order.

        Raises:
            TypeError, ValueError: as ``blocks``.
        """
        return torch.cat([torch.arange(block.start, block.stop, device=device) for block in self.blocks(tokens, rank)])

    def attend(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        expand: Expand,
        *,
        tokens: int,
        softmax_scale: float | None = None,
        store: Store | None = None,
        backend: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of this rank's tokens over all tokens of the prompt up to their own.

        Args:
            q: [n, h, d_qk], queries of the tokens ``positions(tokens)``, bf16, fp16 or float32.
            rows: [n, width], latents of the same tokens, which are sent to the other ranks unchanged.
            expand: maps rows [m, width] to keys [m, h_k, d_qk] and values [m, h_k, d_v] in q's dtype.
            tokens: tokens of the prompt, the same on all ranks.
            softmax_scale: above 0; d_qk^-0.5 if None.
            store: called once with each rank's rows and positions, including this rank's, to write them to a cache.
            backend: backend of ``dense_prefill``.

        Returns:
            out [n, h, d_v] in q's dtype, and lse, natural logarithm, float32 [n, h].

        Raises:
            TypeError, ValueError: arguments of a wrong type, dtype or shape, or that differ between ranks.
            RuntimeError: a rank does not make the first call with this length within the timeout.
        """
        checks.positive_int("tokens", tokens)
        low, high = self.blocks(tokens)
        checks.tensor("q", q, (len(low) + len(high), "h", "d_qk"), checks.FLOAT_DTYPES)
        checks.tensor("rows", rows, (q.shape[0], "width"), checks.FLOAT_DTYPES, q.device)
        facts = {"tokens": tokens, "width": rows.shape[1], "dtype": rows.dtype, "softmax_scale": softmax_scale}
        self._agreement.check("attend", facts)
        gradients.warn_if_dropped("PrefillRing.attend", q, rows)
        with torch.no_grad():
            return self._attend_to_all_ranks(q, rows, expand, tokens, softmax_scale, store, backend)

    def _attend_to_all_ranks(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        expand: Expand,
        tokens: int,
        softmax_scale: float | None,
        store: Store | None,
        backend: str | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``attend`` with checked arguments."""
        rank, size = self.group.rank(), self.group.size()
        low, _ = self.blocks(tokens)
        rows_here, merged = rows.contiguous(), None
        for step in range(size):
            owner = (rank - step) % size
            works, incoming = self._exchange(rows_here, tokens, owner) if step < size - 1 else ([], rows_here)
            if store is not None and rows_here.shape[0]:
                store(rows_here, self.positions(tokens, owner, rows_here.device))
            begin = len(low) if owner > rank else 0
            visible = rows_here[: len(self.blocks(tokens, owner)[0])] if owner < rank else rows_here
            part = _attend(q[begin:], *expand(visible), owner == rank, softmax_scale, backend)
            if merged is None:
                merged = part
            elif part[1].numel() and visible.shape[0]:
                target = tuple(x[begin:] for x in merged)
                for into, new in zip(target, merge_states(*zip(target, part, strict=True)), strict=True):  # type: ignore[arg-type]
                    into.copy_(new)
            for work in works:
                work.wait()
            rows_here = incoming
        assert merged is not None
        return merged[0].to(q.dtype), merged[1]

    def _exchange(self, rows_here: torch.Tensor, tokens: int, owner: int) -> tuple[list[dist.Work], torch.Tensor]:
        """Start sending the rows to the next rank and receiving those of the previous rank."""
        rank, size = self.group.rank(), self.group.size()
        after, before = (dist.get_global_rank(self.group, (rank + step) % size) for step in (1, -1))
        incoming = rows_here.new_empty(sum(map(len, self.blocks(tokens, (owner - 1) % size))), rows_here.shape[1])
        operations = []
        if rows_here.numel():
            operations.append(dist.P2POp(dist.isend, rows_here, after, self.group))
        if incoming.numel():
            operations.append(dist.P2POp(dist.irecv, incoming, before, self.group))
        return (dist.batch_isend_irecv(operations) if operations else []), incoming


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out in float32, and lse."""
    counts = [q.shape[0], keys.shape[0]]
    cu_queries, cu_keys = to_device([[0, count] for count in counts], q.device, torch.int32).unbind()
    out, lse = dense_prefill(
        q, keys, values, cu_queries, cu_keys, *counts, softmax_scale=softmax_scale, causal=causal, backend=backend
    )
    return out.float(), lse
