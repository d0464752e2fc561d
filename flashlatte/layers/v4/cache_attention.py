"""Attention of a step's queries over cache pages, or over rows gathered from them into a workspace."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.layers.v4.cache import V4Cache
from flashlatte.layers.v4.config import V4Config
from flashlatte.layers.v4.group_step import SelectedGroups
from flashlatte.layers.v4.step import V4Step
from flashlatte.layers.v4.workspace import Gathered, VisibleRows, WorkspaceChunk, paged_slices
from flashlatte.ops.cache_gather import cache_gather
from flashlatte.ops.index_workspace import index_workspace
from flashlatte.ops.sparse_decode import sparse_decode
from flashlatte.ops.sparse_prefill import sparse_prefill

# The group size passed for layers without groups: longer than any request.
_NO_GROUPS = 2**31 - 1


def attend_cache(
    q: torch.Tensor,
    config: V4Config,
    step: V4Step,
    cache: V4Cache,
    selected: SelectedGroups | None,
    sinks: torch.Tensor,
    backend: str | None,
) -> torch.Tensor:
    """Attention of queries [T, H, head_dim] over their windows and selected groups: [T, H, head_dim].

    Args:
        sinks: float32 [H].
    """
    head_dim = q.shape[2]
    topk = None if config.indexer is None else config.indexer.topk
    chunks = () if step.prefill is None else step.prefill.plan(config.ratio, topk)
    out = torch.empty_like(q)
    for tokens in paged_slices(chunks, q.shape[0]):
        sparse_decode(
            q[tokens].unsqueeze(1),
            cache.window,
            step.window_slots[tokens].unsqueeze(1),
            cache_format=cache.cache_format,
            topk_length=step.window_counts[tokens],
            attn_sink=sinks,
            extra_k_cache=None if selected is None else cache.groups,
            extra_indices=None if selected is None else selected.slots(tokens).unsqueeze(1),
            extra_topk_length=None if selected is None else selected.counts[tokens],
            head_dim_v=head_dim,
            out=out[tokens].unsqueeze(1),
            backend=backend,
        )
    for chunk in chunks:
        workspace = q.new_empty(chunk.num_requests * chunk.rows, 1, head_dim)
        if selected is not None and cache.groups is not None and chunk.group_rows:
            _gather(cache.groups, cache.group_format, selected.groups.table, chunk, chunk.groups, workspace, backend)
        _gather(cache.window, cache.cache_format, step.window_table, chunk, chunk.window, workspace, backend)
        indices, counts = _visible_rows(config, chunk, selected, backend)
        sparse_prefill(
            q[chunk.tokens],
            workspace,
            indices.unsqueeze(1),
            d_v=head_dim,
            attn_sink=sinks,
            topk_length=counts,
            out=out[chunk.tokens],
            backend=backend,
        )
    return out


def _gather(
    cache: torch.Tensor,
    cache_format: CacheFormat | None,
    table: torch.Tensor,
    chunk: WorkspaceChunk,
    gathered: Gathered,
    workspace: torch.Tensor,
    backend: str | None,
) -> None:
    cache_gather(
        cache,
        table[chunk.requests],
        gathered.rows,
        cache_format=cache_format,
        seq_starts=gathered.starts,
        seq_ends=gathered.ends,
        out=workspace.squeeze(1),
        backend=backend,
    )


def _visible_rows(
    config: V4Config, chunk: WorkspaceChunk, selected: SelectedGroups | None, backend: str | None
) -> VisibleRows:
    """The workspace rows that the chunk's tokens attend to."""
    cached = chunk.visible if selected is None or selected.indices is None else None
    if cached:
        return cached[0]
    group_indices = None
    if selected is not None and chunk.group_rows:
        group_indices = selected.indices_below(chunk.group_rows, chunk.tokens)
    visible = index_workspace(
        group_indices,
        chunk.cu_queries,
        chunk.seq_lens,
        chunk.tokens.stop - chunk.tokens.start,
        window=config.window,
        ratio=_NO_GROUPS if group_indices is None else config.ratio,
        topk=1 if group_indices is None else None,
        workspace_rows=chunk.rows,
        window_row=chunk.group_rows,
        gather_lens=chunk.gather_lens,
        backend=backend,
    )
    if cached is not None:
        cached.append(visible)
    return visible
