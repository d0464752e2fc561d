"""Prefill over a gathered workspace has the same results as decode over the caches."""

from __future__ import annotations

import torch

import flashlatte
from flashlatte import kv_cache
from flashlatte.kv_cache.registry import as_format
from flashlatte.layers import V4Step


def test_sparse_prefill_over_results_of_gather_last_and_index_workspace():
    torch.manual_seed(0)
    lengths, new, window, ratio, page_size = [23, 9], [5, 9], 6, 4, 4
    layout = as_format("fp32", 32)
    tokens, groups = (kv_cache.pack(torch.randn(12, page_size, 1, 32), layout) for _ in range(2))
    table = torch.randperm(12).view(2, 6).int()
    spans = [range(length - count, length) for length, count in zip(lengths, new, strict=True)]
    ids = torch.tensor([request for request, span in enumerate(spans) for _ in span])
    positions = torch.tensor([position for span in spans for position in span])
    step = V4Step.build(ids, positions, table, {ratio: (table, table)}, window=window, page_size=page_size)

    # Each token selects some of its visible groups, in ascending order, then -1.
    chosen = torch.full((len(ids), 3), -1, dtype=torch.int32)
    for token, seen in enumerate(step.groups[ratio].num_visible.tolist()):
        some = torch.randperm(seen)[:3].sort().values
        chosen[token, : len(some)] = some.int()
    slots = flashlatte.index_convert(chosen, table, page_size, request_ids=ids)
    q, sinks = torch.randn(len(ids), 2, 32), torch.randn(2)
    expected, _ = flashlatte.sparse_decode(
        q.unsqueeze(1),
        tokens,
        step.window_slots.unsqueeze(1),
        topk_length=step.window_counts,
        attn_sink=sinks,
        extra_k_cache=groups,
        extra_indices=slots.unsqueeze(1),
        head_dim_v=32,
    )

    # The workspace of a request: its groups, then the tokens that its windows reach.
    rows, window_row = 20, 6
    seq_lens, gather_lens = torch.tensor(lengths), torch.tensor([count + window - 1 for count in new])
    workspace = torch.full((2, rows, 32), torch.nan)
    kv_cache.gather_last(groups, table, seq_lens // ratio, workspace)
    kv_cache.gather_last(tokens, table, seq_lens, workspace, gather_lens=gather_lens, offset=window_row)
    indices, counts = flashlatte.index_workspace(
        chosen,
        torch.tensor([0, 5, 14]),
        seq_lens,
        len(ids),
        window=window,
        ratio=ratio,
        workspace_rows=rows,
        window_row=window_row,
        gather_lens=gather_lens.minimum(seq_lens),
    )
    out, _, _ = flashlatte.sparse_prefill(
        q, workspace.view(-1, 1, 32), indices.unsqueeze(1), d_v=32, attn_sink=sinks, topk_length=counts
    )
    torch.testing.assert_close(out, expected.squeeze(1))
