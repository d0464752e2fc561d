"""Training steps with tokens or heads divided over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from flashlatte.ops.dense_prefill import dense_prefill

if TYPE_CHECKING:
    import torch.distributed as dist


class TrainingRanks(Protocol):
    """The ranks among which a step is divided: the tokens of its batch (context parallelism), a layer's heads (tensor
    parallelism), or both. The methods are differentiable and collective: every rank calls them, and runs their backward
    passes, in the same order.
    """

    @property
    def heads_group(self) -> dist.ProcessGroup | None:
        """The ranks with the other heads of the same tokens; None if this rank has all heads."""
        ...

    @property
    def tokens(self) -> int | None:
        """Number of tokens of the batch on all ranks; None if this rank has all of them."""
        ...

    @property
    def blocks(self) -> Sequence[range] | None:
        """The tokens of the batch that this rank has, in the order of its rows; None for all."""
        ...

    def check(self, facts: Mapping[str, object]) -> None:
        """Raise ValueError on all ranks unless every rank passes the same facts about the step. The ``heads`` among
        them may differ between the ranks of ``heads_group``."""
        ...

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, which is the same on all ranks of ``heads_group``, as input of this rank's heads. Its gradient
        is summed over these ranks."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the rows of all tokens of the batch, in order, from the ranks' rows [n, …]. The gradient of a row is
        summed over the ranks."""
        ...


def attend_blocks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: Sequence[range],
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    softmax_scale: float,
    *,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of some blocks of a packed batch's tokens over all of its tokens.

    Args:
        query: [n, h, d], queries of the tokens of ``blocks``.
        keys, values: [T, h, d] and [T, h, d_v], for the batch's first T tokens, which include all blocks.
        cu_seqlens: int32 [m + 1], boundaries of the sequences of the batch.
        window: tokens that each query attends to, its own included; None: all up to it.

    Returns:
        out [n, h, d_v] and lse [n, h].
    """
    parts = []
    for part, block in zip(query.split([len(block) for block in blocks]), blocks, strict=True):
        # Keys end at the end of the block, so the block's queries of a sequence are aligned with its last keys.
        # Sequences before the block have keys but no queries.
        parts.append(
            dense_prefill(
                part,
                keys[: block.stop],
                values[: block.stop],
                cu_seqlens.clamp(block.start, block.stop) - block.start,
                cu_seqlens.clamp(max=block.stop),
                min(max_seqlen, len(block)),
                max_seqlen,
                softmax_scale=softmax_scale,
                causal=True,
                window=window,
                deterministic=torch.are_deterministic_algorithms_enabled(),
            )
        )
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)
