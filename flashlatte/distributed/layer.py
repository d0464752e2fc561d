"""The MLA layer with its heads divided over ranks: tensor parallelism."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flashlatte.distributed.agreement import Agreement, as_group
from flashlatte.distributed.summing import RankSum
from flashlatte.layers import MLAAttention, MLAConfig
from flashlatte.layers.metadata import MLAMetadata


class TensorParallelAttention(nn.Module):
    """``MLAAttention`` with its heads divided over ranks; the sum of the ranks' outputs is the result of each.

    Every rank computes each token's latent, which all heads share, and without more stores it: a cache on each rank.
    Metadata from ``shard_metadata`` divides the keys too, so that a token is stored once.

    Args:
        config: sizes of the whole layer.
        group: a process group of torch.distributed; all ranks if None. Rank r has heads r · H // size to
            (r + 1) · H // size - 1 of H.
        timeout: how long a rank waits for the others to come to a call of a new shape.
        options: of ``MLAAttention``: backend, dtype, device, …; not heads.

    Attributes:
        layer: this rank's ``MLAAttention``. Its ``load_weights`` and ``load_checkpoint`` take the whole layer's
            weights and keep this rank's part.

    Raises:
        TypeError, ValueError: as ``MLAAttention``; fewer heads than ranks; ranks whose configs differ.
        RuntimeError: a rank that does not make the layer within ``timeout``.
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
        # Compared before anything is checked: a rank that raises alone leaves the others waiting.
        self._agreement.check("TensorParallelAttention", {"config": config})
        if heads < size:
            raise ValueError(f"config must have at least as many heads as the {size} ranks of group, got {heads}")
        self.layer = MLAAttention(config, heads=(rank * heads // size, (rank + 1) * heads // size), **options)

    def forward(self, hidden: torch.Tensor, cache: torch.Tensor, metadata: MLAMetadata, **options: Any) -> torch.Tensor:
        """As ``MLAAttention.forward``, with the same hidden states [tokens, hidden_size] on every rank.

        ``cache`` is this rank's, ``metadata`` the step's (from ``shard_metadata`` where keys are divided), and
        ``options`` are the other arguments of ``MLAAttention.forward``. The ranks' parts are summed in the dtype of
        ``hidden``.
        """
        if isinstance(hidden, torch.Tensor):
            self._agreement.check("forward", {"hidden": tuple(hidden.shape), "dtype": hidden.dtype})
        return self._sum(self.layer(hidden, cache, metadata, **options))
