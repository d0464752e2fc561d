"""Parts of a training step by each rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.indexer_loss_calls import arguments, with_gradients

from flashlatte.ops.indexer_loss import indexer_loss, reference
from flashlatte.testing.cases import SparsePrefillCase

LOSS_CASE = SparsePrefillCase(7, 25, 7, 9, head_dim=8, d_v=6, topk_lengths=True, empty_rows=0.2)


def loss_arguments(dense: bool) -> dict[str, Any]:
    return arguments(LOSS_CASE, dense, dtype=torch.float64)


def loss_of_heads(dense: bool) -> tuple[torch.Tensor, ...]:
    """The indexer's loss with a rank's heads of the attention, in several blocks of queries, and its gradients."""
    given, rank, size = loss_arguments(dense), dist.get_rank(), dist.get_world_size()
    heads = LOSS_CASE.h_q
    given["q"] = given["q"][:, rank * heads // size : (rank + 1) * heads // size]
    width = LOSS_CASE.s_kv if dense else LOSS_CASE.topk
    with mock.patch.object(reference, "BLOCK_BYTES", 200 * width):
        return with_gradients(indexer_loss, given, group=dist.group.WORLD)
