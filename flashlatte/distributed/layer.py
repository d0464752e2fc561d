"""Tensor parallelism: the MLA layer with its heads divided over ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flashlatte.distributed.agreement import Agreement, as_group
from flashlatte.distributed.peer_memory import RankSum
from flashlatte.distributed.training import ContextShard, HeadRanks
from flashlatte.layers import MLAAttention, MLAConfig
from flashlatte.layers.metadata import MLAMetadata
from flashlatte.layers.training import TrainingOutput


class TensorParallelAttention(nn.Module):
    """``MLAAttention`` with its heads divided over ranks. Every rank returns the sum of the ranks' outputs.

    Every rank computes and stores the latents of all tokens, which all heads share. With metadata from
    ``shard_metadata``, keys are sharded as well, and each token is stored on one rank.

    Args:
        config: sizes of the whole layer.
        group: a process group of torch.distributed; all ranks if None. Rank r has heads r · H // size to
            (r + 1) · H // size - 1 of H.
        timeout: how long a rank waits for the others at the first call with a new shape.
        options: arguments of ``MLAAttention`` other than heads: backend, dtype, device, …

    Attributes:
        layer: this rank's ``MLAAttention``. Its ``load_weights`` and ``load_checkpoint`` take the whole layer's
            weights and keep this rank's part.

    Raises:
        TypeError, ValueError: as ``MLAAttention``; fewer heads than ranks; configs that differ between ranks.
        RuntimeError: a rank does not create the layer within ``timeout``.
    """

    def __init__(
        self,
        config: MLAConfig,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: timedelta = timedelta(seconds=60),
        **options: Any,
    ) -> None:
        super().__init__()
        group = as_group(group)
        heads, rank, size = config.num_attention_heads, group.rank(), group.size()
        self.group = group
        self._agreement = Agreement(group, timeout)
        self._sum = RankSum(group, self._agreement)
        # Compare before validation: if one rank raises alone, the others wait.
        self._agreement.check("TensorParallelAttention", {"config": config})
        if heads < size:
            raise ValueError(f"config must have at least as many heads as the {size} ranks of group, got {heads}")
        self.layer = MLAAttention(config, heads=(rank * heads // size, (rank + 1) * heads // size), **options)

    def forward(self, hidden: torch.Tensor, cache: torch.Tensor, metadata: MLAMetadata, **options: Any) -> torch.Tensor:
        """``MLAAttention.forward`` with all heads. The ranks' outputs are summed in the dtype of ``hidden``.

        Args:
            hidden: [tokens, hidden_size], the same on every rank.
            cache: this rank's cache.
            metadata: the step's metadata, from ``shard_metadata`` if keys are sharded.
            options: the other arguments of ``MLAAttention.forward``.
        """
        if isinstance(hidden, torch.Tensor):
            self._agreement.check("forward", {"hidden": tuple(hidden.shape), "dtype": hidden.dtype})
        return self._sum(self.layer(hidden, cache, metadata, **options))

    def forward_training(
        self,
        hidden: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        *,
        shard: ContextShard | None = None,
        **options: Any,
    ) -> TrainingOutput:
        """``MLAAttention.forward_training`` with all heads; the target of the indexer's loss is their mean.

        Gradients are complete on every rank and must not be summed over these ranks: those of q_b_proj, kv_b_proj and
        o_proj are for the rank's own heads, and those of hidden and of the other parameters are the same on all ranks.
        (The bias of o_proj is on the first rank only.) In the backward pass the gradients of the queries' and keys'
        latents are summed over the ranks in float32.

        Args:
            hidden: [tokens, hidden_size], the same on every rank of the group.
            shard: the rank's tokens of the batch, for context parallelism over another group: its ranks have the same
                heads and other tokens, and gradients of parameters are the terms of a sum over them.
            options: the other arguments of ``MLAAttention.forward_training``: indices, dense.

        Raises:
            TypeError, ValueError: as ``MLAAttention.forward_training``; arguments that differ between ranks; a shard
                over the same group.
            RuntimeError: a rank does not make the first call with these arguments within the timeout.
        """
        ranks = HeadRanks(self.group, self._agreement, shard)
        if isinstance(hidden, torch.Tensor):
            self._agreement.check("forward_training", {"hidden": tuple(hidden.shape), "dtype": hidden.dtype})
        output = self.layer.forward_training(hidden, cu_seqlens, max_seqlen, ranks=ranks, **options)
        return output._replace(out=ranks.sum(output.out))
