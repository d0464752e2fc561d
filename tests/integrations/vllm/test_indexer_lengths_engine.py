"""Batches whose requests have different numbers of new tokens, through the indexer's metadata and selection."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from flashlatte.integrations.vllm.backends import common
from flashlatte.integrations.vllm.backends.indexer import select_tokens
from flashlatte.integrations.vllm.backends.indexer_metadata import FlashLatteIndexerMetadataBuilder
from flashlatte.ops.index_quantize import index_quantize

PAGE, HEADS, HEAD_DIM = 16, 2, 128


def builder(drafts):
    made = object.__new__(FlashLatteIndexerMetadataBuilder)
    made.device, made.reorder_batch_threshold, made.sharded = torch.device("cpu"), 1 + drafts, None
    return made


def batch(counts, contexts, host_surplus=0):
    """vLLM's metadata; ``host_surplus``: drafts of the last step that the host counts although they were rejected."""
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor(counts, dtype=torch.int32) + torch.tensor(contexts, dtype=torch.int32)
    pages = int(lengths.max() + host_surplus) // PAGE + 1
    table = torch.arange(len(counts) * pages, dtype=torch.int32).view(-1, pages).flip(0)
    positions = [range(context, context + count) for count, context in zip(counts, contexts, strict=True)]
    slots = [int(table[request, p // PAGE]) * PAGE + p % PAGE for request, own in enumerate(positions) for p in own]
    return CommonAttentionMetadata(
        query_start_loc=starts.clone(),
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths + host_surplus,
        num_reqs=len(counts),
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        max_seq_len=4096,
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots),
    )


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("surplus", [0, 2])
@pytest.mark.parametrize(
    ("counts", "drafts", "decoding"),
    [
        ([4, 4, 4], 3, 12),
        ([4, 1, 2], 3, 7),
        ([1, 1, 1], 0, 3),
        ([1, 2, 30, 30], 3, 3),
        ([2, 2, 1], 0, 0),
        ([5, 5], 0, 0),
    ],
)
def test_each_token_selects_among_its_own_past(monkeypatch, counts, drafts, decoding, surplus, invariant):
    """Also if the host does not know yet that drafts were rejected: those keys have the largest scores here."""
    monkeypatch.setattr(common, "BATCH_INVARIANT", invariant)
    contexts = [37, 15, 1, 70][: len(counts)]
    given = batch(counts, contexts, host_surplus=surplus)
    metadata = builder(0 if invariant else drafts).build(0, given)
    tokens = sum(counts)
    assert metadata.num_decode_tokens == (tokens if invariant else decoding)
    generator = torch.Generator().manual_seed(0)
    cache = torch.zeros(given.block_table_tensor.numel(), PAGE, HEAD_DIM + 4, dtype=torch.uint8)
    index_quantize(cache, torch.arange(cache.shape[0] * PAGE), torch.full((cache.shape[0] * PAGE, HEAD_DIM), 9.0))
    for request, length in enumerate(given.seq_lens.tolist()):
        slots = [int(given.block_table_tensor[request, p // PAGE]) * PAGE + p % PAGE for p in range(length)]
        index_quantize(cache, torch.tensor(slots), torch.rand(length, HEAD_DIM, generator=generator))
    queries = torch.ones(tokens, HEADS, HEAD_DIM).to(torch.float8_e4m3fn)
    selected = torch.full((tokens, 16), -7, dtype=torch.int32)
    everything = torch.full((tokens, 128), -7, dtype=torch.int32)
    for out in (selected, everything):
        select_tokens(metadata, cache, queries, torch.ones(tokens, HEADS), out)
    token = 0
    for count, context in zip(counts, contexts, strict=True):
        for position in range(context, context + count):
            assert sorted(everything[token].tolist()) == [-1] * (127 - position) + list(range(position + 1))
            chosen = [place for place in selected[token].tolist() if place >= 0]
            assert len(set(chosen)) == min(16, position + 1)
            assert max(chosen) <= position
            token += 1


def test_padding_requests_are_dropped():
    given = batch([4, 4], [20, 9])
    starts = torch.tensor([0, 4, 8, 8, 8], dtype=torch.int32)
    padding = {"block_table_tensor": torch.zeros(4, 3, dtype=torch.int32), "seq_lens": torch.tensor([24, 13, 0, 0])}
    padding |= {"query_start_loc_cpu": starts, "query_start_loc": starts, "num_reqs": 4}
    metadata = builder(3).build(0, given.replace(**padding))
    assert (metadata.num_decode_tokens, metadata.seq_lens.tolist()) == (8, [24, 13])
    # A CUDA graph pads tokens too: each padding request stands for as many as the others have.
    metadata = builder(3).build(0, given.replace(num_actual_tokens=16, **padding))
    assert (metadata.num_decode_tokens, metadata.seq_lens.tolist()) == (16, [24, 13, 0, 0])


def test_drafts_update_metadata_in_place():
    """vLLM builds the metadata of the first draft only, and advances its buffers."""
    from flashlatte.integrations.vllm.backends.dense import FlashLatteMLAMetadataBuilder
    from flashlatte.integrations.vllm.backends.sparse import FlashLatteSparseMLAMetadataBuilder

    given = batch([1, 1, 1], [20, 9, 3])
    dense = object.__new__(FlashLatteMLAMetadataBuilder)
    decode = dense._build_decode(
        block_table_tensor=given.block_table_tensor,
        seq_lens_device=given.seq_lens,
        max_seq_len=21,
        query_start_loc_cpu=given.query_start_loc_cpu,
        query_start_loc_device=given.query_start_loc,
        num_decode_tokens=3,
        max_query_len=1,
        dcp_tot_seq_lens_device=None,
    )
    index = builder(3).build(0, given)
    given.seq_lens += 1
    given.block_table_tensor += 5
    dense.update_draft_decode_metadata(decode)
    builder(3).update_draft_decode_metadata(index)
    for part in (decode, index):
        assert part.seq_lens.tolist() == [22, 11, 5]
        assert torch.equal(part.block_table, given.block_table_tensor)

    sparse = object.__new__(FlashLatteSparseMLAMetadataBuilder)
    sparse.device = torch.device("cpu")
    ids = torch.full((9,), 7, dtype=torch.int32)
    starts = torch.tensor([0, 2, 4, 4], dtype=torch.int32)
    sparse.update_draft_decode_metadata(
        SimpleNamespace(num_decode_tokens=6, query_start_loc=starts, req_id_per_token=ids)
    )
    assert ids.tolist() == [0, 0, 1, 1, 2, 2, 7, 7, 7]
