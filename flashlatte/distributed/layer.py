"""The MLA layer over several ranks: heads divided (tensor parallelism), and keys too (with ``ContextParallel``)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flashlatte.distributed import collectives
from flashlatte.distributed.agreement import Agreement
from flashlatte.distributed.context_parallel import ContextParallel
from flashlatte.distributed.peer_memory import PeerMemory
from flashlatte.distributed.plan import ShardPlan
from flashlatte.layers import MLAAttention, MLAConfig
from flashlatte.layers.cache import LatentCache
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
        group = group or dist.group.WORLD
        if group is None:
            raise ValueError("group must be a process group, and torch.distributed has none yet: init_process_group()")
        heads, rank, size = config.num_attention_heads, group.rank(), group.size()
        if heads < size:
            raise ValueError(f"config must have at least as many heads as the {size} ranks of group, got {heads}")
        self.group = group
        self._agreement = Agreement(group, timeout)
        self._peers: PeerMemory | str | None = None
        self._agreement.check("TensorParallelAttention", {"config": config})
        self.layer = MLAAttention(config, heads=(rank * heads // size, (rank + 1) * heads // size), **options)

    def forward(self, hidden: torch.Tensor, cache: torch.Tensor, metadata: MLAMetadata, **options: Any) -> torch.Tensor:
        """As ``MLAAttention.forward``, with the same hidden states on every rank: [tokens, hidden_size].

        The ranks' parts are summed in the dtype of ``hidden``.
        """
        if isinstance(hidden, torch.Tensor):
            self._agreement.check("forward", {"hidden": tuple(hidden.shape), "dtype": hidden.dtype})
        return self._sum(self.layer(hidden, cache, metadata, **options))

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        if part.numel() == 0 or self.group.size() == 1:
            return part
        if self._peers is None:
            self._peers = PeerMemory.reach(self.group, part.device, self._agreement)
        if isinstance(self._peers, PeerMemory) and self._peers.sums(part):
            return self._peers.sum(part)
        return collectives.all_reduce(part, self.group)


@dataclass(frozen=True)
class DecodeOverRanks:
    """Attention of a step's decode part over the keys of all ranks, as ``DecodePart`` holds it."""

    context: ContextParallel
    plan: ShardPlan

    def __call__(
        self, query: torch.Tensor, cache: LatentCache, softmax_scale: float, backend: str | None
    ) -> torch.Tensor:
        out, _ = self.context.decode(
            query,
            cache.pages,
            self.plan,
            cache_format=cache.layout,
            head_dim_v=cache.value_dim,
            softmax_scale=softmax_scale,
            k_scale=cache.scale,
            backend=backend,
        )
        return out


def shard_metadata(metadata: MLAMetadata, context: ContextParallel, *, cache_format: str | None = None) -> MLAMetadata:
    """A step's metadata for a rank whose cache has a part of every request's keys.

    It runs on the device: inside a CUDA graph it follows what ``MLAMetadataBuilder.build`` wrote since.

    Args:
        metadata: built for pages of as many tokens as all ranks hold of a page: a multiple of size · interleave.
        context: whose ranks divide the keys. They are the ranks of the layer's tensor parallelism, or some of them, and
            have equally many heads.
        cache_format: of the cache, by name, needed for those with scales.

    Returns:
        Metadata for pages of ``page_size`` / size tokens, of which this rank stores its own.

    Raises:
        ValueError: pages that cannot be divided so; metadata that is divided already, has an indexer's selection, or
            has prefill over cached tokens, which have no such form yet (prefill of whole prompts has).
    """
    if metadata.sharding is not None:
        raise ValueError(f"metadata must not be divided yet, got a part for {metadata.sharding}")
    if metadata.selection is not None:
        raise ValueError("metadata must be without a selection: layers with an indexer are not divided by keys yet")
    if metadata.prefill is not None and metadata.prefill.chunks:
        raise ValueError(
            "metadata must have no prefill over cached tokens, whose keys lie on other ranks too; whole prompts, and "
            "steps within the builder's max_decode_queries, may be divided"
        )
    page_tokens, decode = metadata.page_size, metadata.decode
    slots = context.sharding.local_slots(metadata.slot_mapping, page_tokens)
    if decode is not None:
        plan = context.plan(
            decode.block_table,
            decode.seq_lens,
            page_tokens=page_tokens,
            queries=decode.queries,
            cache_format=cache_format,
        )
        decode = dataclasses.replace(decode, over_ranks=DecodeOverRanks(context, plan))
    return dataclasses.replace(
        metadata,
        page_size=page_tokens // context.sharding.size,
        slot_mapping=slots,
        decode=decode,
        sharding=context.sharding,
    )
