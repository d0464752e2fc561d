"""The launcher: the target kernel of Hopper among the portable kernels."""

from __future__ import annotations

import torch

from flashlatte.kernels.hopper.mla_tiles import ROWS
from flashlatte.kernels.hopper.row_loads import BOX, LatentKeys
from flashlatte.ops.indexer_loss import portable
from flashlatte.ops.indexer_loss.hopper.target_kernel import TargetHeads, target_kernel
from flashlatte.ops.indexer_loss.params import IndexerLossParams, IndexerLossResults
from flashlatte.ops.indexer_loss.seen_keys import SlotRanges
from flashlatte.runtime import checks
from flashlatte.runtime.strides import strides_in_use
from flashlatte.runtime.tma_descriptors import describe

# Slots of a program of the target kernel.
_SPLIT = 2048


def loss_and_gradients(params: IndexerLossParams, results: IndexerLossResults) -> None:
    checks.begins_aligned("hopper", q=params.q, kv=params.kv)
    portable.loss_and_gradients(params, results, _sum_probabilities)


def _sum_probabilities(
    params: IndexerLossParams, slots: SlotRanges, lse: torch.Tensor, first_token: int, tokens: int, target: torch.Tensor
) -> None:
    q, kv = params.q, params.kv
    h_q, head_dim = q.shape[1:]
    described = describe(q, q.shape, strides_in_use(q), (1, ROWS.value, BOX.value))
    target_kernel[(tokens * -(-slots.width // _SPLIT),)](
        TargetHeads(described, lse, lse.stride(0), lse.stride(1), h_q),
        LatentKeys(kv, kv.stride(0) // 8),
        slots,
        first_token=first_token,
        target=target,
        softmax_scale=params.softmax_scale,
        SPLIT=_SPLIT,
        HAS_ROPE=head_dim == 576,
        BLOCKS=-(-h_q // ROWS.value),
        num_warps=4,
    )
