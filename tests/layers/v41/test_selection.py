"""The two levels of the indexer: published blocks, and the groups selected within them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from flashlatte import kv_cache
from flashlatte.layers.v4 import V4Step
from flashlatte.layers.v41.config import CandidateConfig
from flashlatte.layers.v41.selection import IndexQueries

PAGE_SIZE, PAGES, TOPK = 4, 8, 5


def queries_of(positions):
    """Queries of one request with 32 keys in permuted pages, one key a token; and their scores [T, 32]."""
    draw = torch.Generator().manual_seed(0)
    table = torch.randperm(PAGES, generator=draw).view(1, PAGES)
    keys = kv_cache.allocate(kv_cache.get_format("index_fp32", 32), PAGES, PAGE_SIZE)
    keys.copy_(torch.randn(keys.shape, generator=draw))
    ids = torch.zeros(len(positions), dtype=torch.int64)
    groups = {1: (table, table)}
    step = V4Step.build(ids, torch.tensor(positions), table, groups, window=2, page_size=PAGE_SIZE)
    q, weights = torch.randn(len(positions), 4, 32, generator=draw), torch.randn(len(positions), 4, generator=draw)
    in_order = keys[table[0]].flatten(0, 2)
    scores = torch.einsum("th,thk->tk", weights, torch.einsum("thd,kd->thk", q, in_order).relu())
    return IndexQueries(q, weights, keys, step.groups[1], TOPK, None), scores


def selected_by(found, token):
    """The groups that a token selects, without trailing -1."""
    rows, count = found.indices[token].tolist(), int(found.counts[token])
    assert rows[count:] == [-1] * (TOPK - count)
    return rows[:count]


def best(scores, keys):
    """The positions among ``keys`` with the highest scores, ascending."""
    return sorted(sorted(keys, key=lambda key: (-scores[key].item(), key))[:TOPK])


@pytest.mark.parametrize("block_size", [1, 3, 4, 6, 8])
@pytest.mark.parametrize("workspace_bytes", [1, 2**20])
def test_blocks_and_groups(block_size, workspace_bytes):
    """Blocks within pages and across them; logits of all tokens, or of one token at a time."""
    positions = [0, 3, 4, 11, 22, 30, 31]
    queries, scores = queries_of(positions)
    queries = replace(queries, workspace_bytes=workspace_bytes)
    candidates = CandidateConfig(0, 3, block_size)
    selected, blocks = queries.select_and_publish(candidates)
    within = queries.select_within(candidates, blocks)
    for token, position in enumerate(positions):
        count, seen = position + 1, range(position + 1)
        assert selected_by(selected, token) == best(scores[token], seen)
        by_block = [max(scores[token, b : min(b + block_size, count)].tolist()) for b in range(0, count, block_size)]
        by_block[-1] = math.inf
        chosen = sorted(sorted(range(len(by_block)), key=lambda block: (-by_block[block], block))[:3])
        assert [block for block in blocks[token].tolist() if block >= 0] == chosen
        keys = [key for key in seen if key // block_size in chosen]
        assert selected_by(within, token) == best(scores[token], keys)


def test_tokens_without_groups():
    queries, _ = queries_of([0, 5])
    hidden = replace(queries.groups, num_visible=torch.tensor([0, 6], dtype=torch.int32))
    candidates = CandidateConfig(0, 3, 4)
    selected, blocks = replace(queries, groups=hidden).select_and_publish(candidates)
    within = replace(queries, groups=hidden).select_within(candidates, blocks)
    for one in (selected, within):
        assert (len(selected_by(one, 0)), len(selected_by(one, 1))) == (0, TOPK)
    assert blocks[0].tolist() == [-1] * 3
