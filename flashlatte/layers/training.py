"""Attention of a training step: an MLA layer over whole sequences, without a cache, with gradients.

The indexer has a separate graph (arXiv:2512.02556, §2.1): its inputs are detached, it is trained by ``indexer_loss``
alone, and the selection has no gradient.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

import torch

from flashlatte.layers import models
from flashlatte.layers.absorbed import up_projections
from flashlatte.layers.config import IndexerConfig
from flashlatte.layers.indexer import IndexProjections
from flashlatte.layers.parts import (
    NAMES,
    QueryLatent,
    has_query_latent,
    head_factors,
    key_rope_norm,
    latent_factor,
    owns_latents,
    part,
    project_output,
    project_query,
    sinks,
    softmax_scale,
)
from flashlatte.layers.training_batch import Rotation, TrainingBatch
from flashlatte.layers.training_ranks import TrainingRanks, attend_blocks
from flashlatte.layers.weights import linear_weight
from flashlatte.ops.dense_prefill import dense_prefill
from flashlatte.ops.index_select import index_select
from flashlatte.ops.indexer_loss import indexer_loss
from flashlatte.ops.sparse_attention import sparse_attention
from flashlatte.runtime import checks


class SelectableKeys(Protocol):
    """The range of keys that each token may select, int32 [T]."""

    @property
    def key_start(self) -> torch.Tensor: ...

    @property
    def key_end(self) -> torch.Tensor: ...


class TrainingOutput(NamedTuple):
    """Results of a layer's training step.

    Attributes:
        out: [T, hidden_size].
        indexer_loss: the sum of the divergences of the indexer, float32 (float64 for float64), 0-dimensional;
            differentiable. None if the layer has no indexer, or none of its parameters requires a gradient.
        num_rows: int64, 0-dimensional: the number of tokens in that sum; None without it.
        indices: int32 [T, 1, topk], the selected tokens; None if a token attends to all of its sequence up to its own.
    """

    out: torch.Tensor
    indexer_loss: torch.Tensor | None = None
    num_rows: torch.Tensor | None = None
    indices: torch.Tensor | None = None


class KeyRows(NamedTuple):
    """Normalized latents [T, kv_lora_rank] and rotated keys [T, 1, rope] of a batch's tokens."""

    latent: torch.Tensor
    k_rope: torch.Tensor


class IndexOperands(NamedTuple):
    """Index queries [T, h_i, d_i], index keys [T, d_i], and head weights [T, h_i], float32 or float64 for float64."""

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor


def attend(
    module: Any,
    hidden: torch.Tensor,
    batch: TrainingBatch,
    rotation: Rotation | None,
    *,
    indexer: IndexProjections | None = None,
    config: IndexerConfig | None = None,
    indices: torch.Tensor | None = None,
    dense: bool = False,
    ranks: TrainingRanks | None = None,
    query_factors: torch.Tensor | None = None,
    window: int | None = None,
    rows: KeyRows | None = None,
    positions: torch.Tensor | None = None,
) -> TrainingOutput:
    """Attention of a flat batch [T, hidden_size] through a module with transformers' names of the projections.

    Its submodules are called, so that their hooks run, except ``kv_b_proj`` in sparse attention, whose weight is folded
    into queries and outputs. Under autocast products and attention are in autocast's dtype.

    Args:
        rotation: rotation of queries and keys; None: they are not rotated.
        indexer: the module's indexer; None if it has none, or shares the selection of the layer before.
        config: config of the indexer; None for a layer that attends to every token.
        indices: the selection of the layer before, for a layer that shares it.
        dense: attend to every token although there is a config, as in the indexer's warm-up, which trains on all keys.
        ranks: the ranks over which the step is divided. hidden, rotation and the results are then of this rank's
            tokens, while indices and key ranges refer to tokens of the whole batch.
        query_factors: [T] or [T, h], factors of queries; None: none.
        window: number of tokens that a query attends to in a layer without an indexer, including its own; None: all up
            to its own.
        rows: the rows of an earlier layer, for a module without latents of its own; None: the module's own
            (``key_rows``).
        positions: int [T], positions of the tokens in their sequences, for a module whose queries have learned factors
            (Mistral Large 4).

    Raises:
        TypeError, ValueError: a module with other parts than these; a layer that shares a selection without one.
    """
    check_names(module, NAMES)
    dense = dense or config is None or batch.max_seqlen <= config.topk
    if not dense and indexer is None and indices is None:
        raise ValueError("indices must be those of the previous layer for a layer that shares a selection, got None")
    dtype = product_dtype((module.kv_a_proj_with_mqa if owns_latents(module) else module.q_proj).weight)
    # Also if no gradient is recorded: the first pass of a reentrant checkpoint must have the same results.
    trains_indexer = indexer is not None and requires_gradient(indexer)
    if ranks is not None and not torch.compiler.is_compiling():
        ranks.check(_facts(module, batch, dtype, dense, trains_indexer))
    if (scaling := part(module, "softmax_scaling")) is not None:
        query_factors = _learned_factors(scaling, positions, dtype)
    rope, rank = module.qk_rope_head_dim, module.kv_lora_rank
    to_heads = torch.nn.Identity() if ranks is None else ranks.to_heads
    q_latent = of_heads = None
    if has_query_latent(module):
        projected = module.q_a_proj(hidden)
        q_latent = QueryLatent(projected, module.q_a_layernorm(projected))
        of_heads = QueryLatent(to_heads(projected), to_heads(q_latent.normalized))
    query, gate = project_query(module, to_heads(hidden), of_heads, query_factors)
    q_nope, q_rope = query.split((module.qk_nope_head_dim, rope), dim=-1)
    latent, k_rope = key_rows(module, hidden, rotation) if rows is None else rows
    if rotation is not None:
        q_rope = rotation(q_rope)
    q_rope, k_rope = q_rope.to(dtype), k_rope.to(dtype)
    if ranks is not None:
        gathered = ranks.gather(to_heads(torch.cat((latent.to(dtype), k_rope.squeeze(1)), dim=-1)))
        latent, k_rope = gathered[:, :rank], gathered[:, None, rank:]
    scale = softmax_scale(module)
    sink = sinks(module, torch.promote_types(dtype, torch.float32))

    operands = None
    if indexer is not None and config is not None and (trains_indexer or not dense):
        q_input = (hidden if q_latent is None else q_latent.normalized).detach()
        unlearned = None if rotation is None else rotation.detach()
        operands = index_operands(indexer, config, hidden.detach(), q_input, unlearned, dtype, positions)
        if ranks is not None:
            operands = operands._replace(k=ranks.gather(operands.k))
    seen: dict[str, Any]
    if dense:
        out, lse = _attend_heads(module, q_nope, q_rope, latent, k_rope, batch, scale, dtype, window, sink)
        seen, indices = {"key_start": batch.key_start, "key_end": batch.key_end}, None
    else:
        if operands is not None and config is not None:
            indices = select(operands, batch, config.topk)
        assert indices is not None
        out, lse = _attend_selected(module, q_nope, q_rope, latent, k_rope, indices, scale, dtype, sink)
        seen = {"indices": indices}
    loss = num_rows = None
    if trains_indexer and operands is not None:
        with torch.no_grad():
            folded, keys = _absorb(module, q_nope, q_rope, latent, k_rope, dtype)
            # The target is the attention probabilities, which do not sum to 1 with a sink.
            total = lse if sink is None else torch.logaddexp(lse, sink)
        deterministic = torch.are_deterministic_algorithms_enabled()
        loss, num_rows = indexer_loss(
            *operands,
            folded,
            keys,
            **seen,
            lse=total.detach(),
            softmax_scale=scale,
            deterministic=deterministic,
            group=None if ranks is None else ranks.heads_group,
        )
    return TrainingOutput(project_output(module, out, gate), loss, num_rows, indices)


def _facts(
    module: Any, batch: TrainingBatch, dtype: torch.dtype, dense: bool, trains_indexer: bool
) -> dict[str, object]:
    """What all ranks of a step must agree on, as far as the host knows it: boundaries on a GPU are not read."""
    boundaries = batch.cu_seqlens
    return {
        "heads": module.heads,
        "widths": (module.kv_lora_rank, module.qk_rope_head_dim),
        "dtype": dtype,
        "dense": dense,
        "trained indexer": trains_indexer,
        "cu_seqlens": tuple(boundaries.tolist() if checks.has_values(boundaries) else boundaries.shape),
    }


def key_rows(module: Any, hidden: torch.Tensor, rotation: Rotation | None) -> KeyRows:
    """The rows of hidden states [T, hidden_size], for a module that computes latents."""
    latent, k_rope = module.kv_a_proj_with_mqa(hidden).split((module.kv_lora_rank, module.qk_rope_head_dim), dim=-1)
    latent = module.kv_a_layernorm(latent) * latent_factor(module)
    if key_rope_norm(module) is not None:
        k_rope = module.k_rope_only_layernorm(k_rope)
    k_rope = k_rope.unsqueeze(1)
    return KeyRows(latent, k_rope if rotation is None else rotation(k_rope))


def _learned_factors(scaling: Any, positions: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if positions is None:
        raise ValueError("positions must be given for a module whose queries have learned factors, got None")
    return head_factors(scaling, positions, dtype)


def index_operands(
    indexer: IndexProjections,
    config: IndexerConfig,
    hidden: torch.Tensor,
    q_input: torch.Tensor,
    rotation: Rotation | None,
    dtype: torch.dtype,
    positions: torch.Tensor | None = None,
) -> IndexOperands:
    """Operands of index logits in ``dtype``, unquantized.

    Args:
        hidden: [T, hidden_size].
        q_input: queries' normalized latents [T, q_lora_rank], or hidden states for a model without these.
        positions: as for ``attend``.
    """
    norm, scaling = part(indexer, "q_input_norm"), part(indexer, "softmax_scaling")
    q = indexer.wq_b(q_input if norm is None else norm(q_input)).unflatten(-1, (-1, config.head_dim))
    if scaling is not None:
        q = q * _learned_factors(scaling, positions, q.dtype)[..., None]
    k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(1)
    if rotation is not None:
        q, k = (_rotate_index(x, rotation, config) for x in (q, k))
    q, k = q.to(dtype), k.to(dtype)
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))
    weights = weights.to(torch.promote_types(dtype, torch.float32))
    return IndexOperands(q, k.squeeze(1), weights * config.num_heads**-0.5)


def _rotate_index(x: torch.Tensor, rotation: Rotation, config: IndexerConfig) -> torch.Tensor:
    """Rotate the first dims of x [T, h, d_i], or the last ones; the result begins with the rotated dims."""
    rope = 2 * rotation.cosines.shape[-1]
    widths = (x.shape[-1] - rope, rope) if config.rope_last else (rope, x.shape[-1] - rope)
    rotated, others = x.split(widths, dim=-1)[:: -1 if config.rope_last else 1]
    return torch.cat((rotation(rotated, config.rope_layout == models.INTERLEAVED), others), dim=-1)


@torch.no_grad()
def select(operands: IndexOperands, ranges: SelectableKeys, topk: int) -> torch.Tensor:
    """int32 [T, 1, topk]: the keys that each token selects, ascending, then -1."""
    dtype = torch.bfloat16 if operands.q.dtype == torch.bfloat16 else torch.float32
    q, k = (x.detach().to(dtype) for x in (operands.q, operands.k))
    weights = operands.weights.detach().float() * q.shape[-1] ** -0.5
    positions = index_select(q, k, weights, ranges.key_start, ranges.key_end, topk)
    return torch.where(positions >= 0, positions + ranges.key_start[:, None], -1).unsqueeze(1)


def _attend_heads(
    module: Any,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    batch: TrainingBatch,
    scale: float,
    dtype: torch.dtype,
    window: int | None,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention in multi-head form: out [T, h, v] and lse [T, h] over keys, without the sink."""
    if batch.blocks is not None:
        end = max(block.stop for block in batch.blocks)
        latent, k_rope = latent[:end], k_rope[:end]
    per_head = module.kv_b_proj(latent).unflatten(-1, (-1, module.qk_nope_head_dim + module.v_head_dim)).to(dtype)
    k_nope, values = per_head.split((module.qk_nope_head_dim, module.v_head_dim), dim=-1)
    query = torch.cat((q_nope.to(dtype), q_rope), dim=-1)
    keys = torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1)), dim=-1)
    if batch.blocks is None:
        out, lse = dense_prefill(
            query,
            keys,
            values,
            batch.cu_seqlens,
            batch.cu_seqlens,
            batch.max_seqlen,
            batch.max_seqlen,
            softmax_scale=scale,
            causal=True,
            window=window,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    else:
        out, lse = attend_blocks(
            query, keys, values, batch.blocks, batch.cu_seqlens, batch.max_seqlen, scale, window=window
        )
    if sink is not None:
        out = out * torch.sigmoid(lse - sink).unsqueeze(-1).to(dtype)
    if batch.has_padding:
        out = torch.where((batch.key_end > batch.key_start)[:, None, None], out, 0.0)
    return out, lse


def _attend_selected(
    module: Any,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the selected tokens in absorbed form: out [T, h, v] and lse [T, h] over keys, without the sink."""
    query, rows = _absorb(module, q_nope, q_rope, latent, k_rope, dtype)
    out, lse = sparse_attention(
        query,
        rows,
        indices,
        attn_sink=sink,
        softmax_scale=scale,
        d_v=module.kv_lora_rank,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    _, w_uv = _up_projections(module, dtype)
    return torch.einsum("thl,hvl->thv", out, w_uv), lse


def _absorb(
    module: Any,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries over latents [T, h, latent + rope], and rows of latents [T, 1, latent + rope]."""
    w_uk, _ = _up_projections(module, dtype)
    folded = torch.einsum("thn,hnl->thl", q_nope.to(dtype), w_uk)
    rows = torch.cat((latent.to(dtype).unsqueeze(1), k_rope), dim=-1)
    return torch.cat((folded, q_rope), dim=-1), rows


def _up_projections(module: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    weight = linear_weight(module, "kv_b_proj", dtype).to(dtype)
    return up_projections(weight, module.qk_nope_head_dim, module.v_head_dim)


def product_dtype(weight: torch.Tensor) -> torch.dtype:
    """The dtype of products and attention in a layer with this weight: autocast's, or the weight's."""
    device_type = weight.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype


def requires_gradient(indexer: Any) -> bool:
    return any(parameter.requires_grad for parameter in indexer.parameters())


def check_names(module: Any, parts: Collection[str]) -> None:
    """Raise ValueError if a module has submodules or parameters other than ``parts``: no gradient would reach them."""
    names = [name for name, _ in module.named_children()] + [name for name, _ in module.named_parameters(recurse=False)]
    if others := [name for name in names if name not in parts]:
        raise ValueError(f"module must have only parts that training supports, got {', '.join(others)}")
