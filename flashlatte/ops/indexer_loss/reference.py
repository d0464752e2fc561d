"""The indexer's loss in plain PyTorch, a few query tokens at a time: the specification.

For each query, over the keys that it attends to (a selection, or a range): the target t is the mean of the attention
probabilities over the heads of all ranks of the group, the prediction p is the softmax of the index logits
I[j] = Σ_h w[h] · relu(index_scale · qI[h] · kI[j]), and the loss is KL(t ‖ p) = Σ_j t[j] (log t[j] - log p[j]). Its
gradient with respect to a logit is p - t. If all probabilities of a query underflow (its given lse includes a sink, or
more keys), t is 0, and so are its loss and gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from flashlatte.kernels.softmax import attend
from flashlatte.runtime.process_groups import sum_over_ranks

BLOCK_BYTES = 64 * 2**20
# Below it log t is that of this value, so that t = 0 contributes 0.
SMALLEST_TARGET = 1e-10


class IndexerLossParams(NamedTuple):
    """The checked arguments of ``api.indexer_loss``.

    Attributes:
        group: the name of a process group, or None.
        with_gradient: whether gradients are computed.
    """

    index_q: torch.Tensor
    index_k: torch.Tensor
    index_weights: torch.Tensor
    q: torch.Tensor
    kv: torch.Tensor
    lse: torch.Tensor | None
    indices: torch.Tensor | None
    topk_length: torch.Tensor | None
    key_start: torch.Tensor | None
    key_end: torch.Tensor | None
    softmax_scale: float
    index_scale: float
    use_relu: bool
    deterministic: bool
    group: str | None
    with_gradient: bool


class IndexerLossResults(NamedTuple):
    """The summed loss, the number of rows, and the gradients of the sum, contiguous. The gradients are written only
    ``with_gradient``; those of index_k and index_weights are float32, or float64 for float64."""

    loss: torch.Tensor
    num_rows: torch.Tensor
    d_index_q: torch.Tensor
    d_index_k: torch.Tensor
    d_index_weights: torch.Tensor


class SeenKeys(NamedTuple):
    """The keys of a block of queries.

    Attributes:
        rows: the queries.
        selected: [rows, keys], the selected rows of kv, 0 for invalid indices; None for ranges.
        visible: [rows, keys], whether the query attends to the key.
        keys, index_keys: [rows, keys, d] of kv and of index_k, 0 for keys that no query attends to.
    """

    rows: slice
    selected: torch.Tensor | None
    visible: torch.Tensor
    keys: torch.Tensor
    index_keys: torch.Tensor


@torch.no_grad()
def loss_and_gradients(params: IndexerLossParams, results: IndexerLossResults) -> None:
    """Write ``results``. Deterministic, also without ``deterministic``."""
    index_q, index_k, index_weights, q, kv = params[:5]
    lse, indices = params.lse, params.indices
    loss, num_rows, d_index_q, d_index_k, d_index_weights = results
    wide = torch.promote_types(index_q.dtype, torch.float32)
    loss.zero_()
    num_rows.zero_()
    d_index_k.zero_()
    step = _queries_at_once(index_q, q, kv.shape[0] if indices is None else indices.shape[2])
    for seen in _blocks(params, step, wide):
        rows, visible = seen.rows, seen.visible
        target = _sum_over_heads(
            q[rows].to(wide), seen, None if lse is None else lse[rows], params.softmax_scale
        )  # [rows, keys]
        if params.group is not None:
            sum_over_ranks(target, params.group)
        total = target.sum(dim=-1, keepdim=True)
        target = target / torch.where(total == 0, 1.0, total)

        # index_q and index_weights of a query without visible keys may be NaN.
        has_keys = visible.any(dim=-1)
        index_query = torch.where(has_keys[:, None, None], index_q[rows].to(wide), 0.0)
        weights = torch.where(has_keys[:, None], index_weights[rows].to(wide), 0.0)
        scores = torch.einsum("shd,snd->shn", index_query, seen.index_keys) * params.index_scale
        scores = torch.where(visible[:, None], scores, 0.0)
        activations = torch.relu(scores) if params.use_relu else scores
        index_logits = torch.einsum("sh,shn->sn", weights, activations)
        prediction, row_lse = attend(index_logits, visible)
        log_prediction = torch.where(visible, index_logits - row_lse.unsqueeze(-1), 0.0)
        loss += (target * (target.clamp_min(SMALLEST_TARGET).log() - log_prediction)).sum()
        num_rows += has_keys.sum()
        if not params.with_gradient:
            continue

        # The targets of a query sum to 1, or to 0 if all of them underflow.
        d_logits = torch.where(total == 0, 0.0, prediction - target)
        d_index_weights[rows] = torch.einsum("sn,shn->sh", d_logits, activations)
        d_scores = d_logits[:, None] * weights.unsqueeze(-1) * params.index_scale  # [rows, HI, keys]
        if params.use_relu:
            d_scores = torch.where(scores > 0, d_scores, 0.0)
        d_index_q[rows] = torch.einsum("shn,snd->shd", d_scores, seen.index_keys).to(d_index_q.dtype)
        _add_gradient_of_keys(d_index_k, d_scores, index_query, seen)


def _sum_over_heads(
    query: torch.Tensor, seen: SeenKeys, lse: torch.Tensor | None, softmax_scale: float
) -> torch.Tensor:
    """The attention probabilities, summed over this rank's heads."""
    scores = torch.einsum("shd,snd->shn", query, seen.keys) * softmax_scale
    if lse is None:
        return attend(scores, seen.visible[:, None])[0].sum(dim=1)
    scores = scores.masked_fill(~seen.visible[:, None], float("-inf"))
    return torch.where(seen.visible, torch.exp(scores - lse.unsqueeze(-1)).sum(dim=1), 0.0)


def _add_gradient_of_keys(
    total: torch.Tensor, d_scores: torch.Tensor, index_query: torch.Tensor, seen: SeenKeys
) -> None:
    if seen.selected is None:
        total += torch.einsum("shn,shd->nd", d_scores, index_query)
        return
    d_keys = torch.einsum("shn,shd->snd", d_scores, index_query)
    d_keys = torch.where(seen.visible.unsqueeze(-1), d_keys, 0.0)
    # index_add_ uses atomics on a GPU, and index_put_ does on the CPU; the other one has a fixed order there.
    if total.is_cuda:
        total.index_put_((seen.selected.flatten(),), d_keys.flatten(0, 1), accumulate=True)
    else:
        total.index_add_(0, seen.selected.flatten(), d_keys.flatten(0, 1))


def _queries_at_once(index_q: torch.Tensor, q: torch.Tensor, width: int) -> int:
    """Queries of a block. Independent of the number of heads of q, which may differ between ranks that sum the same
    blocks."""
    numbers = index_q.shape[1] + q.shape[2] + index_q.shape[2]
    return max(1, BLOCK_BYTES // (4 * max(width, 1) * numbers))


def _blocks(params: IndexerLossParams, step: int, dtype: torch.dtype) -> Iterator[SeenKeys]:
    index_k, kv, indices, key_start, key_end = (
        params.index_k,
        params.kv,
        params.indices,
        params.key_start,
        params.key_end,
    )
    s_q = params.q.shape[0]
    s_kv = kv.shape[0]
    position = torch.arange(s_kv if indices is None else indices.shape[2], device=kv.device)
    for begin in range(0, s_q, step):
        rows = slice(begin, min(begin + step, s_q))
        if indices is None:
            assert key_start is not None
            assert key_end is not None
            visible = (position >= key_start[rows, None]) & (position < key_end[rows, None])
            # Keys that no query of the block attends to may be NaN.
            seen = visible.any(dim=0)[:, None]
            keys, index_keys = (torch.where(seen, x.to(dtype), 0.0)[None] for x in (kv[:, 0], index_k))
            keys, index_keys = (x.expand(visible.shape[0], -1, -1) for x in (keys, index_keys))
            yield SeenKeys(rows, None, visible, keys, index_keys)
        else:
            selected = indices[rows, 0].long()
            visible = (selected >= 0) & (selected < s_kv)
            if params.topk_length is not None:
                visible &= position < params.topk_length[rows, None]
            selected = torch.where(visible, selected, 0)
            keys, index_keys = (
                torch.where(visible.unsqueeze(-1), x[selected].to(dtype), 0.0) for x in (kv[:, 0], index_k)
            )
            yield SeenKeys(rows, selected, visible, keys, index_keys)
