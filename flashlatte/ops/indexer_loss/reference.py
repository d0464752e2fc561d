"""The indexer's loss in plain PyTorch, a few query tokens at a time: the specification.

Of a query, over the keys that it sees (a selection, or a range): the target t is the mean over heads of the attention
probabilities, the prediction p the softmax of the index logits I[j] = Σ_h w[h] · relu(index_scale · qI[h] · kI[j]), and
the loss is KL(t ‖ p) = Σ_j t[j] (log t[j] - log p[j]). Its gradient with respect to a logit is p - t.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from flashlatte.kernels.softmax import attend

BLOCK_BYTES = 64 * 2**20
# Below it log t is that of this value, so that t = 0 contributes 0.
SMALLEST_TARGET = 1e-10


class LossBlock(NamedTuple):
    """What the loss of some queries needs.

    Attributes:
        rows: the queries.
        selected: [rows, keys], the keys of the selection, 0 for those that select nothing; None for ranges.
        visible: [rows, keys].
        index_query: [rows, HI, D], 0 for a query that sees no key.
        index_keys: [rows, keys, D], 0 for a key that no query sees.
        scores: [rows, HI, keys], index_scale · qI · kI, 0 where not visible.
        activations: relu of the scores, or the scores.
        target, prediction: t and p [rows, keys], 0 where not visible.
        loss: [rows], 0 without a visible key.
    """

    rows: slice
    selected: torch.Tensor | None
    visible: torch.Tensor
    index_query: torch.Tensor
    index_keys: torch.Tensor
    scores: torch.Tensor
    activations: torch.Tensor
    target: torch.Tensor
    prediction: torch.Tensor
    loss: torch.Tensor


@torch.no_grad()
def forward(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    index_weights: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    key_start: torch.Tensor | None,
    key_end: torch.Tensor | None,
    softmax_scale: float,
    index_scale: float,
    use_relu: bool,
    loss: torch.Tensor,
    num_rows: torch.Tensor,
) -> None:
    loss.zero_()
    num_rows.zero_()
    attention = q, kv, indices, topk_length, key_start, key_end
    for block in _blocks(index_q, index_k, index_weights, *attention, softmax_scale, index_scale, use_relu):
        loss += block.loss.sum()
        num_rows += block.visible.any(dim=-1).sum()


@torch.no_grad()
def backward(
    d_loss: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    index_weights: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    key_start: torch.Tensor | None,
    key_end: torch.Tensor | None,
    softmax_scale: float,
    index_scale: float,
    use_relu: bool,
    d_index_q: torch.Tensor,
    d_index_k: torch.Tensor,
    d_index_weights: torch.Tensor,
) -> None:
    wide = torch.promote_types(index_q.dtype, torch.float32)
    d_keys_sum = torch.zeros_like(index_k, dtype=wide)
    attention = q, kv, indices, topk_length, key_start, key_end
    for block in _blocks(index_q, index_k, index_weights, *attention, softmax_scale, index_scale, use_relu):
        rows = block.rows
        d_logits = (block.prediction - block.target) * d_loss  # [rows, keys]
        d_index_weights[rows] = torch.einsum("sn,shn->sh", d_logits, block.activations).to(d_index_weights.dtype)
        d_scores = d_logits[:, None] * index_weights[rows].to(wide).unsqueeze(-1) * index_scale  # [rows, HI, keys]
        if use_relu:
            d_scores = torch.where(block.scores > 0, d_scores, 0.0)
        d_index_q[rows] = torch.einsum("shn,snd->shd", d_scores, block.index_keys).to(d_index_q.dtype)
        if block.selected is None:
            d_keys_sum += torch.einsum("shn,shd->nd", d_scores, block.index_query)
        else:
            d_keys = torch.einsum("shn,shd->snd", d_scores, block.index_query)
            d_keys = torch.where(block.visible.unsqueeze(-1), d_keys, 0.0)
            # On a GPU index_add_ sums by atomics, on the CPU index_put_ does; the other of the two has a fixed order.
            if d_keys_sum.is_cuda:
                d_keys_sum.index_put_((block.selected.flatten(),), d_keys.flatten(0, 1), accumulate=True)
            else:
                d_keys_sum.index_add_(0, block.selected.flatten(), d_keys.flatten(0, 1))
    d_index_k.copy_(d_keys_sum)


def _blocks(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    index_weights: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    key_start: torch.Tensor | None,
    key_end: torch.Tensor | None,
    softmax_scale: float,
    index_scale: float,
    use_relu: bool,
) -> Iterator[LossBlock]:
    wide = torch.promote_types(index_q.dtype, torch.float32)
    s_q, s_kv = q.shape[0], kv.shape[0]
    width = s_kv if indices is None else indices.shape[2]
    position = torch.arange(width, device=q.device)
    numbers = q.shape[1] + index_q.shape[1] + q.shape[2] + index_q.shape[2]
    step = max(1, BLOCK_BYTES // (4 * max(width, 1) * numbers))
    for begin in range(0, s_q, step):
        rows = slice(begin, min(begin + step, s_q))
        selected = None
        if indices is None:
            assert key_start is not None
            assert key_end is not None
            visible = (position >= key_start[rows, None]) & (position < key_end[rows, None])
            # Keys that no query of the block sees may hold anything.
            seen = visible.any(dim=0)[:, None]
            keys, index_keys = (torch.where(seen, x.to(wide), 0.0)[None] for x in (kv[:, 0], index_k))
            keys, index_keys = (x.expand(visible.shape[0], -1, -1) for x in (keys, index_keys))
        else:
            selected = indices[rows, 0].long()
            visible = (selected >= 0) & (selected < s_kv)
            if topk_length is not None:
                visible &= position < topk_length[rows, None]
            selected = torch.where(visible, selected, 0)
            keys, index_keys = (
                torch.where(visible.unsqueeze(-1), x[selected].to(wide), 0.0) for x in (kv[:, 0], index_k)
            )

        logits = torch.einsum("shd,snd->shn", q[rows].to(wide), keys) * softmax_scale
        target = attend(logits, visible[:, None])[0].mean(dim=1)
        index_query = torch.where(visible.any(dim=-1)[:, None, None], index_q[rows].to(wide), 0.0)
        scores = torch.einsum("shd,snd->shn", index_query, index_keys) * index_scale
        scores = torch.where(visible[:, None], scores, 0.0)
        activations = torch.relu(scores) if use_relu else scores
        index_logits = torch.einsum("sh,shn->sn", index_weights[rows].to(wide), activations)
        prediction, lse = attend(index_logits, visible)
        log_prediction = torch.where(visible, index_logits - lse.unsqueeze(-1), 0.0)
        loss = (target * (target.clamp_min(SMALLEST_TARGET).log() - log_prediction)).sum(dim=-1)
        yield LossBlock(rows, selected, visible, index_query, index_keys, scores, activations, target, prediction, loss)
