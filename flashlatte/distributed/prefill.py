"""``PrefillRing``: the causal attention of one long prompt, its tokens divided over ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from flashlatte.distributed.agreement import Agreement, as_group
from flashlatte.ops.dense_prefill import dense_prefill
from flashlatte.ops.merge_states import merge_states
from flashlatte.runtime import checks
from flashlatte.runtime.transfer import to_device

Expand = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Store = Callable[[torch.Tensor, torch.Tensor], object]


def zigzag_blocks(tokens: int, rank: int, size: int) -> tuple[range, range]:
    """Of 2 · size blocks of a prompt, as equal as can be, those that a rank has: ``rank`` and 2 · size - 1 - rank."""
    count = 2 * size
    low, high = (range(tokens * i // count, tokens * (i + 1) // count) for i in (rank, count - 1 - rank))
    return low, high


class PrefillRing:
    """Each rank attends with its tokens' queries to all ranks' latents, which go round in size - 1 exchanges.

    A prompt is cut into 2 · size blocks, and rank r has the blocks r and 2 · size - 1 - r (zig-zag). Under the causal
    mask that gives every rank the same work in every round, and a rule without a mask: over a shard of a lower rank all
    queries see its first block; over one of a higher rank the second block's queries see all of it; over its own shard
    a rank's attention is causal, as if the two blocks were one text.

    Latents travel (576 numbers a token in DeepSeek-V3, of which its 128 heads' keys and values would be seventy times
    as many) and are expanded where they arrive, while the next ones are on their way. A rank holds two shards of
    latents and the keys and values of one. What the rounds give is merged in float32.

    Args:
        group: a process group of torch.distributed; all ranks if None.
        timeout: how long a rank waits for the others to come to a prompt of a new length.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: timedelta = timedelta(seconds=60)) -> None:
        group = as_group(group)
        self.group = group
        self._agreement = Agreement(group, timeout)

    def blocks(self, tokens: int, rank: int | None = None) -> tuple[range, range]:
        """The two blocks of a prompt of so many tokens that a rank (this one if None) has; either may be empty.

        Raises:
            TypeError, ValueError: ``tokens`` below 0, or a rank that the group does not have.
        """
        size, rank = self.group.size(), self.group.rank() if rank is None else rank
        if not 0 <= checks.integer("rank", rank) < size:
            raise ValueError(f"rank must be from 0 to {size - 1}, got {rank}")
        return zigzag_blocks(checks.positive_int("tokens", tokens, or_zero=True), rank, size)

    def positions(self, tokens: int, rank: int | None = None, device: torch.device | str | None = None) -> torch.Tensor:
        """int64 [n] on ``device``, the tokens of the prompt that a rank (this one if None) has, in order.

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
            rows: [n, width], latents of the same tokens, which other ranks get as they are.
            expand: rows [m, width] to keys [m, h_k, d_qk] and values [m, h_k, d_v] in q's dtype.
            tokens: of the prompt, the same on all ranks.
            softmax_scale: above 0; d_qk^-0.5 if None.
            store: called once with each rank's rows and their positions, this rank's among them, while they are here:
                to write those to a cache that this rank keeps.
            backend: of ``dense_prefill``.

        Returns:
            out [n, h, d_v] in q's dtype, and lse, natural logarithm, float32 [n, h].

        Raises:
            TypeError, ValueError: arguments of a wrong type, dtype or shape, or that differ over ranks.
            RuntimeError: a rank that does not come to a prompt of this length.
        """
        checks.positive_int("tokens", tokens)
        rank, size = self.group.rank(), self.group.size()
        low, high = self.blocks(tokens)
        checks.tensor("q", q, (len(low) + len(high), "h", "d_qk"), checks.FLOAT_DTYPES)
        checks.tensor("rows", rows, (q.shape[0], "width"), checks.FLOAT_DTYPES, q.device)
        facts = {"tokens": tokens, "width": rows.shape[1], "dtype": rows.dtype}
        self._agreement.check("attend", facts)

        held, merged = rows.contiguous(), None
        for step in range(size):
            owner = (rank - step) % size
            waits, coming = self._pass_on(held, tokens, owner) if step < size - 1 else ([], held)
            if store is not None and held.shape[0]:
                store(held, self.positions(tokens, owner, held.device))
            begin = len(low) if owner > rank else 0
            seen = held[: len(self.blocks(tokens, owner)[0])] if owner < rank else held
            part = _attend(q[begin:], *expand(seen), owner == rank, softmax_scale, backend)
            if merged is None:
                merged = part
            elif part[1].numel() and seen.shape[0]:
                target = tuple(x[begin:] for x in merged)
                for into, new in zip(target, merge_states(*zip(target, part, strict=True)), strict=True):  # type: ignore[arg-type]
                    into.copy_(new)
            for wait in waits:
                wait.wait()
            held = coming
        assert merged is not None
        return merged[0].to(q.dtype), merged[1]

    def _pass_on(self, held: torch.Tensor, tokens: int, owner: int) -> tuple[list[dist.Work], torch.Tensor]:
        """Begin to send the next rank what is here, and to get what the rank before has."""
        rank, size = self.group.rank(), self.group.size()
        after, before = (dist.get_global_rank(self.group, (rank + way) % size) for way in (1, -1))
        coming = held.new_empty(sum(map(len, self.blocks(tokens, (owner - 1) % size))), held.shape[1])
        operations = []
        if held.numel():
            operations.append(dist.P2POp(dist.isend, held, after, self.group))
        if coming.numel():
            operations.append(dist.P2POp(dist.irecv, coming, before, self.group))
        return (dist.batch_isend_irecv(operations) if operations else []), coming


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
