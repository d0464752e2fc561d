"""Attention of transformers' MLA models over a paged latent cache. Importing this module imports transformers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flashlatte.integrations.transformers import indexer as stock_indexer
from flashlatte.integrations.transformers import training
from flashlatte.integrations.transformers.cache import PagedLatentCache
from flashlatte.integrations.transformers.calls import CACHE
from flashlatte.integrations.transformers.families import Family, cosines_and_sines
from flashlatte.integrations.transformers.padded import PagedLatents
from flashlatte.integrations.transformers.pooled_indexer import select_columns
from flashlatte.layers.forward import forward, project, rotate_query
from flashlatte.layers.metadata import MLAMetadata
from flashlatte.layers.parts import head_factors, part, project_output, sinks, softmax_scale, source_layer
from flashlatte.layers.rope import unrotated_table
from flashlatte.ops.norm_rope import Rotary
from flashlatte.runtime import gradients


class PagedLatentAttention:
    """Attention over a ``PagedLatentCache``, or of a training step; else it runs the original forward.

    Over a paged cache it runs FlashLatte's MLA layer with the module's own projections. The class adds no state: it is
    set on existing attention modules by changing their class, and removed by changing it back.
    """

    family: Family

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        step = kwargs.pop(training.STEP, None)
        if step is not None and not training.prefers_stock(self, step):
            out, selected = training.attend(self, self.family, hidden_states, step, kwargs)
            return (out, None, selected) if self.family.returns_selection else (out, None)
        if args or not isinstance(kwargs.get(CACHE), PagedLatentCache):
            stock: Any = super()
            return stock.forward(hidden_states, *args, **kwargs)
        module: Any = self
        embeddings, mask = kwargs.pop("position_embeddings", None), kwargs.pop("attention_mask", None)
        latents = kwargs.pop(CACHE).store
        metadata = latents.metadata(hidden_states.device)
        # Prefill uses the attention implementation that the user configured.
        has_custom_implementation = module.config._attn_implementation != module.family.default_implementation
        gradients.warn_if_dropped(f"{self.family.attention_class.__name__} of an enabled model", hidden_states)
        with torch.no_grad():
            columns = None
            if module.family.selects_columns:
                shared = kwargs.pop("prev_topk_indices", None)
                columns = select_columns(module, hidden_states, mask, latents, shared)
                kwargs["columns"] = columns
            if metadata is None or (has_custom_implementation and metadata.prefill is not None):
                out, selected = masked_attention(module, hidden_states, embeddings, mask, latents, **kwargs)
            else:
                # The selection that layers share is in the metadata.
                positions = kwargs.get("position_ids")
                out = flat_attention(module, hidden_states, embeddings, latents, metadata, positions, columns)
                selected = None
            if columns is not None:
                selected = columns if module.next_skip_topk else None
        return (out, None, selected) if module.family.returns_selection else (out, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_paged_attention, (self.family,), vars(self)


@functools.cache
def paged(family: Family) -> Any:
    """The subclass of a family's attention with ``PagedLatentAttention``."""
    name = f"Paged{family.attention_class.__name__}"
    return type(name, (PagedLatentAttention, family.attention_class), {"family": family, "__module__": __name__})


def _new_paged_attention(family: Family) -> Any:
    import importlib

    importlib.import_module(family.module)
    return paged(family).__new__(paged(family))


def flat_attention(
    module: Any,
    hidden_states: torch.Tensor,
    embeddings: Any,
    latents: PagedLatents,
    metadata: MLAMetadata,
    position_ids: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """The MLA layer on the step's flat batch: [b, s, hidden_size]. A hidden token attends to nothing.

    Args:
        position_ids: [b or 1, s], for models that scale queries by position.
        columns: int [b, s, n], the columns that each token attends to; None: the metadata's selection, the layer's
            window, or all.
    """
    flat, positions = hidden_states.flatten(0, 1), _flat_positions(module, hidden_states, position_ids)
    tokens = latents.step.tokens
    if tokens is not None:
        flat = flat[tokens.to(flat.device)]
        positions = None if positions is None else positions[tokens.to(positions.device)]
    factors = _query_factors(module, positions, flat.dtype)
    cache = latents.cache(source_layer(module), flat.device, flat.dtype)
    rotary = _rotary(module, latents, embeddings, metadata.positions)
    indexer = stock_indexer.step_indexer(module, latents, rotary, flat.device, positions)
    window = part(module, "sliding_window")
    indices = None if columns is None else latents.slots_of(columns)
    if window is not None:
        indices = latents.window_slots(window, flat.device)
    out = forward(
        module,
        flat,
        cache,
        metadata,
        rotary,
        indices=indices,
        indexer=indexer,
        query_factors=factors,
        backend=latents.backend,
    )
    if tokens is not None:
        empty_row = module.o_proj(out.new_zeros(1, module.o_proj.in_features))
        out = empty_row.repeat(hidden_states.shape[:2].numel(), 1).index_copy(0, tokens.to(out.device), out)
    return out.view(hidden_states.shape)


def masked_attention(
    module: Any,
    hidden_states: torch.Tensor,
    embeddings: Any,
    attention_mask: torch.Tensor | None,
    latents: PagedLatents,
    prev_topk_indices: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention in multi-head form under a mask, by the model's attention implementation.

    Returns:
        [b, s, hidden_size], and int32 [b, s, topk]: the indexer's selection under the mask, or ``prev_topk_indices``
        in a layer that shares it; None for models without an indexer.
    """
    flat = hidden_states.flatten(0, 1)
    source = source_layer(module)
    cache = latents.cache(source, flat.device, flat.dtype)
    history = latents.read_history(source) if latents.columns else None
    slots = latents.step.slots.flatten().to(flat.device)
    positions = _flat_positions(module, hidden_states, kwargs.get("position_ids"))
    factors = _query_factors(module, positions, flat.dtype)
    rotary = _rotary(module, latents, embeddings, slots, padded=True)
    query, gate, rows, q_latent = project(module, flat, rotary, cache, slots, factors)
    rotate_query(module, query, rotary)
    query, rows = (x.unflatten(0, hidden_states.shape[:2]) for x in (query, rows))
    if history is not None:
        rows = torch.cat((history, rows), dim=1)
    selected = None
    selects = module.indexer is not None or module.family.returns_selection if latents.indexer is not None else False
    if selects and attention_mask is not None:
        normalized = None if q_latent is None else q_latent.normalized.unflatten(0, hidden_states.shape[:2])
        selected = stock_indexer.select_under_mask(
            module,
            hidden_states,
            normalized,
            embeddings,
            attention_mask,
            latents,
            prev_topk_indices,
            kwargs.get("position_ids"),
        )
        if module.config._attn_implementation in ("eager", "sdpa"):
            attention_mask = stock_indexer.mask_unselected(attention_mask, selected)
        else:
            kwargs["indices"] = selected
    if columns is not None:
        attention_mask = module.build_attention_mask_from_topk(columns, query, rows.shape[1])
    if sinks(module) is not None:
        kwargs["s_aux"] = module.sinks
    if part(module, "sliding_window") is not None:
        kwargs["sliding_window"] = module.sliding_window
    out = multi_head_attention(module, query, rows, attention_mask, **kwargs)
    return project_output(module, out, None if gate is None else gate.unflatten(0, hidden_states.shape[:2])), selected


def _flat_positions(module: Any, hidden_states: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """[b · s], the positions of all tokens; None for models that do not scale queries by position."""
    if module.family.query_scaling(module.config) is None and part(module, "softmax_scaling") is None:
        return None
    if position_ids is None:
        raise ValueError("position_ids must be given to a layer that scales queries by position, got None")
    return position_ids.expand(hidden_states.shape[:2]).flatten()


def _query_factors(module: Any, positions: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """[T] or [T, h], factors of queries at ``positions`` [T]; None if queries are not scaled."""
    if positions is None:
        return None
    scaling = module.family.query_scaling(module.config)
    return head_factors(module.softmax_scaling, positions, dtype) if scaling is None else scaling.factors(positions)


def _rotary(
    module: Any, latents: PagedLatents, embeddings: Any, positions: torch.Tensor, *, padded: bool = False
) -> Rotary:
    if not module.family.rotates(module):
        # Operations clamp positions to the table's one row.
        return Rotary(unrotated_table(module.qk_rope_head_dim, positions.device), positions, interleaved=False)
    interleaved = module.family.interleaved(module.config)
    return latents.rotary(embeddings, cosines_and_sines, interleaved, padded=padded)


def multi_head_attention(
    module: Any, query: torch.Tensor, rows: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
) -> torch.Tensor:
    """Attention in multi-head form, by the model's attention implementation (PyTorch's SDPA unless set otherwise).

    Args:
        query: [b, s_q, h, nope + rope].
        rows: [b, s_kv, kv_lora_rank + rope], history and new tokens.
        attention_mask: the mask that transformers created for that implementation.

    Returns:
        [b, s_q, h, v_head_dim].
    """
    latent, k_rope = rows.unsqueeze(1).split((module.kv_lora_rank, module.qk_rope_head_dim), dim=-1)
    key, value = module.expand_kv(latent, k_rope)
    implementation = ALL_ATTENTION_FUNCTIONS.get_interface(
        module.config._attn_implementation, module.family.host.eager_attention_forward
    )
    out, _ = implementation(
        module, query.transpose(1, 2), key, value, attention_mask, dropout=0.0, scaling=softmax_scale(module), **kwargs
    )
    return out
