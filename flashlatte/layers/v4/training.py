"""DeepSeek-V4's attention of a training step: over whole sequences, without a cache, with gradients.

A query attends to a window of tokens, and to compressed groups of tokens, in one softmax with a sink. The indexer,
which selects groups, has a separate graph (``layers.training``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from flashlatte.layers.training import (
    IndexOperands,
    TrainingOutput,
    check_names,
    product_dtype,
    requires_gradient,
    select,
)
from flashlatte.layers.training_batch import TrainingBatch
from flashlatte.layers.v4.config import V4Config, V4IndexerConfig
from flashlatte.layers.v4.modules import output_matrix
from flashlatte.layers.weights import norm_weight
from flashlatte.ops.indexer_loss import indexer_loss
from flashlatte.ops.sparse_attention import sparse_attention

# The submodules that training supports. q_b_norm is transformers', without a weight.
_PARTS = {"q_a_proj", "q_a_norm", "q_b_proj", "q_b_norm", "kv_proj", "kv_norm", "o_a_proj", "o_b_proj", "sinks"}
_PARTS |= {"compressor"}
_COMPRESSOR_PARTS = {"kv_proj", "gate_proj", "position_bias", "kv_norm", "rotary_emb", "indexer", "q_b_proj", "scorer"}


class TrainingGroups(NamedTuple):
    """The compressed groups of a flat batch of T tokens: T // ratio rows, at least 1; the last ones may be unused.

    Attributes:
        first: int64 [G], the first token of each group.
        follows: bool [G], whether the previous group belongs to the same sequence.
        key_start, key_end: int32 [T], the range of groups visible to each token: the complete groups of its sequence up
            to the token.
    """

    first: torch.Tensor
    follows: torch.Tensor
    key_start: torch.Tensor
    key_end: torch.Tensor

    @staticmethod
    def of(batch: TrainingBatch, ratio: int) -> TrainingGroups:
        """Groups of ``ratio`` tokens. The remaining tokens at the end of a sequence are in no group."""
        boundaries, tokens = batch.cu_seqlens.long(), batch.key_start.shape[0]
        device = boundaries.device
        ends = ((boundaries[1:] - boundaries[:-1]) // ratio).cumsum(0)  # number of groups up to each sequence's last
        starts = F.pad(ends, (1, 0))[:-1]
        last = ends.shape[0] - 1

        group = torch.arange(max(tokens // ratio, 1), device=device)
        sequence = torch.searchsorted(ends, group, right=True)
        used = sequence <= last
        sequence = sequence.clamp_max(last)
        place = group - starts[sequence]
        first = torch.where(used, boundaries[sequence] + place * ratio, 0)

        token = torch.arange(tokens, device=device)
        sequence = (torch.searchsorted(boundaries, token, right=True) - 1).clamp(0, last)
        key_start = starts[sequence]
        key_end = key_start + (token + 1 - boundaries[sequence]) // ratio
        inside = batch.key_end > 0
        key_start, key_end = (torch.where(inside, x, 0).int() for x in (key_start, key_end))
        return TrainingGroups(first, used & (place > 0), key_start, key_end)

    def all_visible(self) -> torch.Tensor:
        """int32 [T, G]: all groups visible to each token, padded with -1."""
        group = torch.arange(self.first.shape[0], dtype=torch.int32, device=self.first.device)
        visible = (group >= self.key_start[:, None]) & (group < self.key_end[:, None])
        return torch.where(visible, group, -1)


def window_tokens(batch: TrainingBatch, window: int, shown: torch.Tensor | None = None) -> torch.Tensor:
    """int32 [T, window]: the tokens in each token's window, including its own, padded with -1.

    Args:
        shown: bool [T], False for tokens that are masked in all windows; None: none are.
    """
    token = torch.arange(batch.key_start.shape[0], dtype=torch.int32, device=batch.key_start.device)[:, None]
    columns = token + torch.arange(1 - window, 1, dtype=torch.int32, device=token.device)
    visible = (columns >= batch.key_start[:, None]) & (columns < batch.key_end[:, None])
    if shown is not None:
        visible &= shown[columns.clamp_min(0)]
    return torch.where(visible, columns, -1)


def attend(
    module: Any,
    config: V4Config,
    hidden: torch.Tensor,
    window: torch.Tensor,
    groups: TrainingGroups | None,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    *,
    max_seqlen: int,
    counted: torch.Tensor | None = None,
    dense: bool = False,
) -> TrainingOutput:
    """Attention of a flat batch [T, hidden_size] through a module with transformers' names of the projections.

    Projections are called, so that their hooks run; the weights of norms and of ``o_a_proj`` are read. Under autocast
    products and attention are in autocast's dtype.

    The target of the indexer's loss is the probabilities of the groups, from the softmax over window, groups and sink,
    summed over heads and normalized (arXiv:2512.02556, equations 3 and 4, applied to DeepSeek-V4's attention).

    Args:
        window: int32 [T, window], from ``window_tokens``.
        groups: the groups of the layer's ratio; None for a layer without groups.
        cosines, sines: [T, rope_dim / 2], the rotation of each token.
        max_seqlen: tokens of the longest sequence, or more.
        counted: bool [T], the tokens in the indexer's loss; None: all.
        dense: attend to every group although there is an indexer, as in its warm-up, which trains on all groups.

    Raises:
        TypeError, ValueError: a module with other parts than DeepSeek-V4's.
    """
    check_names(module, _PARTS)
    dtype, eps = product_dtype(module.kv_proj.weight), config.rms_norm_eps
    q_latent = _norm(module, "q_a_norm", module.q_a_proj(hidden), eps)
    query = module.q_b_proj(q_latent).unflatten(-1, (-1, config.head_dim))
    query = F.rms_norm(query, (config.head_dim,), eps=eps)
    query = _rotate_tail(query, cosines, sines).to(dtype)
    kv = _norm(module, "kv_norm", module.kv_proj(hidden), eps).unsqueeze(1)
    kv = _rotate_tail(kv, cosines, sines).to(dtype)

    indices, rows, operands, selected = window, None, None, None
    indexer = None if groups is None else getattr(module.compressor, "indexer", None)
    # Also if no gradient is recorded: the first pass of a reentrant checkpoint must have the same results.
    trains_indexer = indexer is not None and requires_gradient(indexer)
    if groups is not None:
        rows = _compress(module.compressor, config, config.head_dim, hidden, groups, cosines, sines).to(dtype)
        sizes = config.indexer
        dense = dense or sizes is None or max_seqlen // config.ratio <= sizes.topk
        if sizes is not None and (trains_indexer or not dense):
            operands = _index_operands(indexer, config, sizes, hidden, q_latent, groups, cosines, sines, dtype)
            selected = None if dense else select(operands, groups, sizes.topk).squeeze(1)
        visible = groups.all_visible() if selected is None else selected
        tokens = hidden.shape[0]
        indices = torch.cat((window, torch.where(visible >= 0, visible + tokens, -1)), dim=1)
        kv = torch.cat((kv, rows), dim=0)
    sinks = module.sinks.to(_wide(dtype))
    deterministic = torch.are_deterministic_algorithms_enabled()
    out, lse = sparse_attention(
        query, kv, indices.unsqueeze(1), attn_sink=sinks, d_v=config.head_dim, deterministic=deterministic
    )

    loss = num_rows = None
    if trains_indexer and operands is not None and groups is not None and rows is not None:
        total = torch.logaddexp(lse, sinks).detach()
        seen = _seen_groups(groups, selected, counted)
        loss, num_rows = indexer_loss(
            *operands, query.detach(), rows.detach(), **seen, lse=total, deterministic=deterministic
        )
    # Values are rotated keys. The output is rotated back by the query's position, so that its rotation is relative.
    out = _rotate_tail(out, cosines, -sines)
    by_group = out.unflatten(1, (config.o_groups, -1)).flatten(2).transpose(0, 1)  # [o_groups, T, inputs]
    weight = output_matrix(module, dtype).unflatten(0, (config.o_groups, -1))  # [o_groups, o_lora_rank, inputs]
    latent = torch.bmm(by_group, weight.to(dtype).transpose(1, 2)).transpose(0, 1).flatten(1)
    chosen = None if selected is None else selected.unsqueeze(1)
    return TrainingOutput(module.o_b_proj(latent), loss, num_rows, chosen)


def _compress(
    module: Any,
    config: V4Config,
    head_dim: int,
    hidden: torch.Tensor,
    groups: TrainingGroups,
    cosines: torch.Tensor,
    sines: torch.Tensor,
) -> torch.Tensor:
    """Normalized and rotated rows [G, 1, head_dim] of the groups: elementwise weighted means over their tokens.

    If groups overlap, a token has elements for the next group, followed by elements for its own group.
    """
    check_names(module, _COMPRESSOR_PARTS)
    ratio, first = config.ratio, groups.first
    # A batch with fewer tokens has one group, which is unused.
    tokens = (first[:, None] + torch.arange(ratio, device=first.device)).flatten().clamp_max(hidden.shape[0] - 1)
    kv, gate = (
        x.index_select(0, tokens).unflatten(0, (-1, ratio)).to(_wide(x.dtype))
        for x in (module.kv_proj(hidden), module.gate_proj(hidden))
    )  # [G, ratio, (1 + overlap) · head_dim]
    gate = gate + module.position_bias
    if config.overlap:
        earlier = [torch.cat((x[:1], x[:-1]), dim=0)[..., :head_dim] for x in (kv, gate)]
        follows = groups.follows[:, None, None]
        kv = torch.cat((torch.where(follows, earlier[0], 0.0), kv[..., head_dim:]), dim=1)
        gate = torch.cat((torch.where(follows, earlier[1], float("-inf")), gate[..., head_dim:]), dim=1)
    row = _norm(module, "kv_norm", (kv * gate.softmax(dim=1)).sum(dim=1), config.rms_norm_eps)
    return _rotate_tail(row.unsqueeze(1), cosines[first], sines[first])


def _index_operands(
    indexer: Any,
    config: V4Config,
    sizes: V4IndexerConfig,
    hidden: torch.Tensor,
    q_latent: torch.Tensor,
    groups: TrainingGroups,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    dtype: torch.dtype,
) -> IndexOperands:
    """Operands of index logits of groups, unquantized. Hidden states and latents are detached."""
    hidden, q_latent = hidden.detach(), q_latent.detach()
    q = indexer.q_b_proj(q_latent).unflatten(-1, (-1, sizes.head_dim))
    q = _rotate_tail(q, cosines, sines).to(dtype)
    k = _compress(indexer, config, sizes.head_dim, hidden, groups, cosines, sines).to(dtype)
    weights = indexer.scorer.weights_proj(hidden).to(_wide(dtype))
    return IndexOperands(q, k.squeeze(1), weights * sizes.num_heads**-0.5)


def _seen_groups(groups: TrainingGroups, selected: torch.Tensor | None, counted: torch.Tensor | None) -> dict[str, Any]:
    """Arguments of ``indexer_loss``: a selection, or ranges; empty for tokens that are excluded from the loss."""
    if selected is None:
        end = groups.key_end if counted is None else torch.where(counted, groups.key_end, 0)
        return {"key_start": groups.key_start, "key_end": end}
    return {"indices": (selected if counted is None else torch.where(counted[:, None], selected, -1)).unsqueeze(1)}


def _norm(module: Any, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in float32 (float64 for float64), returned in x's dtype."""
    wide = x.to(_wide(x.dtype))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (norm_weight(module, name) * (wide * scale)).to(x.dtype)


def _rotate_tail(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (2i, 2i + 1) of the last elements of x [T, h, d] in float32 (float64 for float64)."""
    rope, wide = 2 * cosines.shape[-1], _wide(x.dtype)
    cosines, sines = cosines.to(wide)[:, None], sines.to(wide)[:, None]
    first, second = x[..., x.shape[-1] - rope :].to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((first * cosines - second * sines, second * cosines + first * sines), dim=-1).flatten(-2)
    return torch.cat((x[..., : x.shape[-1] - rope], rotated.to(x.dtype)), dim=-1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
