"""Metadata built for a batch, and errors for inconsistent arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashlatte import kv_cache
from flashlatte.kv_cache import turboquant
from flashlatte.layers import MLAAttention, MLAConfig, MLAMetadataBuilder, Rope
from flashlatte.layers.metadata import plan_chunks

TABLE = torch.tensor([[4, 1, 7], [0, 3, 2], [5, 6, 9]])


def make_builder(**options: Any) -> Any:
    given: dict[str, Any] = {"num_pages": 10, "max_decode_queries": 2} | options
    return MLAMetadataBuilder(4, 4, 64, 12, "cpu", **given)


def test_parts_positions_and_slots():
    metadata = make_builder().build([0, 1, 3, 9], [6, 12, 8], TABLE)
    assert (metadata.num_tokens, metadata.num_decode_tokens, metadata.max_seq_len) == (9, 3, 12)
    assert metadata.positions.tolist() == [5, 10, 11, 2, 3, 4, 5, 6, 7]
    assert metadata.slot_mapping.tolist() == [5, 10, 11, 22, 23, 24, 25, 26, 27]
    decode, prefill = metadata.decode, metadata.prefill
    assert (decode.queries, decode.seq_lens.tolist(), decode.block_table.tolist()) == (2, [6, 12], TABLE[:2].tolist())
    assert (decode.pad_index.tolist(), decode.unpad_index.tolist()) == ([0, 0, 1, 2], [1, 2, 3])
    assert (prefill.cu_seqlens.tolist(), prefill.max_queries) == ([0, 6], 6)
    (chunk,) = prefill.chunks
    assert (chunk.first, chunk.last, chunk.tokens, chunk.max_queries, chunk.max_keys) == (0, 6, 2, 6, 2)


@pytest.mark.parametrize(("device", "shares"), [("cpu", True), ("meta", False)])
def test_only_metadata_on_the_same_device_is_overwritten(device, shares):
    builder = make_builder()
    metadata = builder.build([0, 1, 3, 9], [6, 12, 8], TABLE).to(torch.device(device))
    assert not metadata.is_overwritten
    builder.build([0, 1, 3, 9], [7, 12, 8], TABLE)
    assert metadata.is_overwritten == shares


def test_a_block_table_of_any_strides():
    strided = TABLE.T.contiguous().T
    assert strided.stride(1) != 1
    metadata = make_builder().build([0, 1, 3, 9], [6, 12, 8], strided)
    assert metadata.slot_mapping.tolist() == [5, 10, 11, 22, 23, 24, 25, 26, 27]


@pytest.mark.parametrize("topk", [None, 4])
def test_metadata_does_not_depend_on_the_default_device(topk):
    step = [0, 1, 3, 9], [6, 12, 8], TABLE
    expected = make_builder(topk=topk).build(*step)
    with torch.device("meta"):
        found = make_builder(topk=topk).build(*step)
    assert found.positions.equal(expected.positions)
    assert found.slot_mapping.equal(expected.slot_mapping)
    if topk is None:
        assert found.prefill.chunks[0].starts.equal(expected.prefill.chunks[0].starts)
    else:
        (chunk,), (wanted,) = found.selection.chunks, expected.selection.chunks
        assert chunk.key_end.equal(wanted.key_end)
        assert chunk.request_ids.equal(wanted.request_ids)


def test_a_batch_of_one_part_lacks_the_other():
    builder = make_builder()
    assert builder.build([0, 1, 2], [3, 4], TABLE[:2]).prefill is None
    metadata = builder.build([0, 3, 7], [3, 4], TABLE[:2])
    assert metadata.decode is None
    assert metadata.prefill.chunks == ()


def test_a_short_request_behind_a_long_one_is_prefill():
    metadata = make_builder().build([0, 1, 6, 7], [3, 5, 9], TABLE)
    assert metadata.num_decode_tokens == 1
    assert metadata.prefill.cu_seqlens.tolist() == [0, 5, 6]


def test_buffers_keep_their_addresses():
    builder = make_builder(cache_format="v32")
    first = builder.build([0, 1, 2], [3, 4], TABLE[:2])
    addresses = [tensor.data_ptr() for tensor in buffers(first)]
    second = builder.build([0, 1, 2], [11, 2], TABLE[1:])
    assert [tensor.data_ptr() for tensor in buffers(second)] == addresses
    assert first.decode.seq_lens.tolist() == [11, 2]
    assert first.positions.tolist() == [10, 1]
    assert first.decode.all_slots[0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11]
    assert first.decode.visible_lens.tolist() == [[11], [2]]


def buffers(metadata):
    decode = metadata.decode
    tensors = (decode.block_table, decode.seq_lens, decode.all_slots, decode.visible_lens)
    return (metadata.positions, metadata.slot_mapping, *tensors)


def test_inference_mode_then_none():
    with torch.inference_mode():
        builder = make_builder()
        builder.build([0, 1], [3], TABLE[:1])
    assert builder.build([0, 1], [4], TABLE[:1]).positions.tolist() == [3]


def test_empty_requests_fill_up_a_captured_batch():
    builder = make_builder(cache_format="v32")
    builder.build([0, 2, 4, 6, 8], [5, 6, 7, 8], torch.arange(8).view(4, 2))
    metadata = builder.build([0, 2], [9], TABLE[:1], pad_requests_to=3)
    assert (metadata.num_tokens, metadata.num_decode_tokens) == (6, 6)
    assert metadata.slot_mapping[2:].tolist() == [-1] * 4
    assert metadata.decode.seq_lens.tolist() == [9, 0, 0]
    assert metadata.decode.visible_lens.tolist() == [[8, 9], [0, 0], [0, 0]]


@pytest.mark.parametrize("workspace", [1, 3, 5, 100])
def test_chunks_hold_every_cached_token_once_in_order(workspace):
    queries, contexts = [2, 1, 4, 3], [5, 0, 9, 1]
    table = torch.arange(12, dtype=torch.int32).view(4, 3)
    chunks = plan_chunks(queries, contexts, table, workspace)
    seen = [[] for _ in queries]
    for chunk in chunks:
        assert 0 < chunk.tokens == int(chunk.cu_keys[-1]) <= workspace
        first = [0, 2, 3, 7].index(chunk.first)
        assert torch.equal(chunk.block_table, table[first : first + len(chunk.starts)])
        assert chunk.last - chunk.first == int(chunk.cu_queries[-1])
        assert chunk.max_keys == int(chunk.cu_keys.diff().max())
        assert chunk.max_queries == int(chunk.cu_queries.diff().max())
        for offset, (start, count) in enumerate(zip(chunk.starts.tolist(), chunk.cu_keys.diff().tolist(), strict=True)):
            seen[first + offset] += range(start, start + count)
    assert seen == [list(range(count)) for count in contexts]
    assert len(chunks) == -(-sum(contexts) // workspace)


GOOD = {"query_start_loc": [0, 1, 4], "seq_lens": [5, 7], "block_table": TABLE[:2]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start_loc": [0, 3, 2]}, r"query_start_loc must not decrease, got 3 before 2 \(request 1\)"),
        ({"query_start_loc": [1, 3, 4]}, "query_start_loc must begin with 0, got 1"),
        ({"query_start_loc": [0, 3]}, "query_start_loc must have 3 entries, one more than seq_lens, got 2"),
        ({"query_start_loc": [0, 1, 65], "seq_lens": [5, 64]}, "max_seq_len 12, request 1 has 64"),
        ({"seq_lens": [5, 2]}, "request 1 has 3 new tokens and seq_lens 2"),
        ({"seq_lens": [1] * 5}, r"seq_lens must have at most 4 \(max_requests\) entries, got 5"),
        ({"seq_lens": []}, "query_start_loc must have 1 entries, one more than seq_lens, got 3"),
        ({"block_table": TABLE}, r"block_table must have shape \[2, pages\]"),
        ({"block_table": TABLE[:2, :1]}, "block_table must have 2 pages for the 5 tokens of request 0, got 1"),
        ({"block_table": TABLE[:2] * 9}, "block_table must hold pages from 0 to 9, request 0 has 36 at 0"),
        ({"slot_mapping": torch.tensor([0, 1, 2])}, r"slot_mapping must have shape \[4\]"),
        ({"slot_mapping": torch.tensor([0, 1, 40, 2])}, "below 40, .* got 40 for token 2"),
        ({"pad_requests_to": 3}, "pad_requests_to needs a step of decode requests with equal numbers"),
        ({"pad_requests_to": 5}, "pad_requests_to must be from 2 to 4, got 5"),
        (
            {"pad_requests_to": 3, "pad_queries": 2},
            "pad_queries must be 1 like the step's requests, or None, got 2",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_inconsistent_lengths_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        make_builder().build(**GOOD | changes)


@pytest.mark.parametrize("slots", [[0, 1, 40, 2], [0, 1, -1, 2]], ids=["beyond the cache", "not stored"])
def test_a_refused_step_leaves_the_previous_one_valid(slots):
    builder = make_builder(topk=4)
    metadata = builder.build(**GOOD)
    held = (metadata.positions, metadata.slot_mapping, metadata.decode.seq_lens)
    before = [x.clone() for x in held]
    with pytest.raises(
        ValueError, match=r"^slot_mapping must (hold slots of the cache|have a slot for every token of a prefill)"
    ):
        builder.build(**GOOD | {"seq_lens": [4, 6], "slot_mapping": torch.tensor(slots)})
    assert not metadata.is_overwritten
    assert all(map(torch.equal, held, before))


def test_too_many_tokens():
    with pytest.raises(ValueError, match="query_start_loc must end with at most max_tokens 10, got 11"):
        MLAMetadataBuilder(4, 4, 10, 12, "cpu").build([0, 11], [11], TABLE[:1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_lens": [5.0, 7]}, "seq_lens must hold ints, got 5.0"),
        ({"seq_lens": 5}, "seq_lens must be of type Sequence, got int"),
        ({"query_start_loc": torch.tensor([0.0, 1, 4])}, "query_start_loc must be ints or a 1-D int32 or int64"),
        ({"block_table": TABLE[:2].float()}, "block_table must be int32 or int64, got float32"),
    ],
)
def test_wrong_types_are_named(changes, message):
    with pytest.raises(TypeError, match=message):
        make_builder().build(**GOOD | changes)


def test_tensors_and_lists_are_accepted():
    builder = make_builder()
    expected = builder.build(**GOOD).positions.clone()
    as_tensors: dict[str, Any] = {name: torch.as_tensor(value, dtype=torch.int32) for name, value in GOOD.items()}
    assert torch.equal(builder.build(**as_tensors).positions, expected)


def test_a_step_without_requests():
    metadata = make_builder().build([0], [], TABLE[:0])
    assert (metadata.num_tokens, metadata.num_decode_tokens, metadata.max_seq_len) == (0, 0, 0)
    assert metadata.decode is metadata.prefill is None


@pytest.mark.parametrize("queries", [None, 2])
def test_a_step_without_requests_fills_a_captured_batch(queries):
    builder = make_builder(cache_format="v32")
    builder.build([0, 2, 4], [5, 6], TABLE[:2])
    metadata = builder.build([0], [], TABLE[:0], pad_requests_to=2, pad_queries=queries)
    count = queries or 1
    assert (metadata.num_tokens, metadata.num_decode_tokens) == (2 * count, 2 * count)
    assert metadata.slot_mapping.tolist() == [-1] * 2 * count
    assert metadata.positions.tolist() == [0] * 2 * count
    assert metadata.decode.seq_lens.tolist() == [0, 0]
    assert metadata.decode.visible_lens.tolist() == [[0] * count] * 2
    assert metadata.decode.pad_index is None


def test_more_padding_tokens_than_decode_takes():
    with pytest.raises(ValueError, match="pad_queries must be at most max_decode_queries 2, got 3"):
        make_builder().build([0], [], TABLE[:0], pad_requests_to=2, pad_queries=3)


def test_requests_without_new_tokens():
    metadata = make_builder().build([0, 0, 2, 2, 7], [6, 5, 0, 9], torch.arange(12).view(4, 3) % 10)
    assert (metadata.num_tokens, metadata.num_decode_tokens) == (7, 2)
    assert metadata.positions.tolist() == [3, 4, 4, 5, 6, 7, 8]
    assert metadata.decode.seq_lens.tolist() == [0, 5, 0]
    assert (metadata.decode.pad_index.tolist(), metadata.decode.unpad_index.tolist()) == ([0, 0, 0, 1, 1, 1], [2, 3])
    metadata = make_builder().build([0, 0, 5, 5], [3, 9, 4], TABLE)
    assert metadata.decode is None
    assert metadata.prefill.cu_seqlens.tolist() == [0, 5, 5]
    (chunk,) = metadata.prefill.chunks
    assert chunk.tokens == 4


SMALL = MLAConfig(32, 2, 16, 8, 4, 8, rope=Rope(max_position=10))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(3, 32)}, r"hidden must have shape \[4, 32\]"),
        (
            {"cache": torch.zeros(10, 4, 1, 24)},
            "cache of format fp32 has rows of 24, and the layer's are kv_lora_rank 16",
        ),
        ({"cache": torch.zeros(10, 4, 1, 656, dtype=torch.uint8)}, "cache of format v32 has rows of 576"),
        ({"k_scale": 0.5}, "k_scale belongs to cache format fp8, got fp32"),
        ({"metadata": ([0, 4], [11])}, "request of 11 tokens, and the config's rope.max_position is 10"),
        ({"indices": torch.zeros(3, 5, dtype=torch.int32)}, r"indices must have shape \[4, topk\]"),
    ],
)
def test_arguments_that_do_not_fit_the_layer_are_named(changes, message):
    changes = dict(changes)
    layer = MLAAttention(SMALL)
    starts, lengths = changes.pop("metadata", ([0, 4], [8]))
    builder = MLAMetadataBuilder(4, 4, 64, 12, "cpu", cache_format=changes.pop("cache_format", "fp32"))
    metadata = builder.build(starts, lengths, torch.arange(12).view(4, 3)[: len(lengths)])
    arguments = {"hidden": torch.zeros(4, 32), "cache": torch.zeros(10, 4, 1, 20), "metadata": metadata}
    with pytest.raises(ValueError, match=message):
        layer(**arguments | changes)


def test_metadata_for_another_cache_format_is_named():
    layer = MLAAttention(MLAConfig(32, 2, 512, 8, 64, 8))
    metadata = MLAMetadataBuilder(4, 4, 64, 12, "cpu").build([0, 1], [5], TABLE[:1])
    cache = kv_cache.allocate("v32", 10, 4)
    with pytest.raises(ValueError, match="metadata must be built for the cache's format v32"):
        layer(torch.zeros(1, 32), cache, metadata)


@pytest.mark.parametrize("heads", [(0, 3), (1, 1), (-1, 2)])
def test_heads_that_the_layer_does_not_have(heads):
    with pytest.raises(ValueError, match="heads must be a range within the layer's 2 heads"):
        MLAAttention(SMALL, heads=heads)


@pytest.mark.parametrize("heads", ["ab", (0, 1, 2), (0.0, 1), 2])
def test_heads_that_are_not_a_pair_of_ints(heads):
    with pytest.raises(TypeError, match=r"^heads must be a pair of ints \(first, last\), got"):
        MLAAttention(SMALL, heads=heads)


def test_no_config():
    with pytest.raises(TypeError, match=r"^config must be an MLAConfig, got NoneType$"):
        MLAAttention(None)  # type: ignore[arg-type]


def test_an_unknown_backend():
    with pytest.raises(ValueError, match=r"backend must be one of hopper, portable, reference.*got 'cuda'"):
        MLAAttention(SMALL, backend="cuda")


@pytest.mark.parametrize("page_size", [2, 8])
def test_a_cache_of_other_pages_is_refused(page_size):
    metadata = MLAMetadataBuilder(4, 4, 64, 12, "cpu").build([0, 4], [8], TABLE[:1])
    message = f"cache must have pages of 4 tokens like the metadata, got pages of {page_size}"
    with pytest.raises(ValueError, match=message):
        MLAAttention(SMALL)(torch.zeros(4, 32), torch.zeros(10, page_size, 1, 20), metadata)


def test_a_cache_of_fewer_pages_is_refused():
    metadata = MLAMetadataBuilder(4, 4, 64, 12, "cpu", num_pages=10).build([0, 4], [8], TABLE[:1])
    with pytest.raises(ValueError, match="cache must have the metadata's 10 pages, got 9"):
        MLAAttention(SMALL)(torch.zeros(4, 32), torch.zeros(9, 4, 1, 20), metadata)


def test_pages_beyond_the_cache_are_found_in_forward():
    """A builder without num_pages records the largest page of a step."""
    layer, builder = MLAAttention(SMALL), MLAMetadataBuilder(4, 4, 64, 12, "cpu")
    cache = torch.zeros(5, 4, 1, 20)
    for table, slots, page in ((TABLE[:1], None, 7), (TABLE[1:2], torch.tensor([0, 1, 22, -1]), 5)):
        metadata = builder.build([0, 4], [12 if slots is None else 8], table, slots)
        with pytest.raises(ValueError, match=f"^cache must have at least {page + 1} pages for this metadata, got 5$"):
            layer(torch.zeros(4, 32), cache, metadata)
    # Entries that no request uses may have any value.
    layer(torch.zeros(4, 32), cache, builder.build([0, 4], [8], TABLE[:1]))


def test_a_page_below_0_is_named():
    with pytest.raises(ValueError, match=r"^block_table must hold pages from 0, request 0 has -1 at 1$"):
        MLAMetadataBuilder(4, 4, 64, 12, "cpu").build([0, 4], [8], torch.tensor([[4, -1, 7]]))


def test_no_metadata():
    with pytest.raises(TypeError, match=r"^metadata must be an MLAMetadata, got NoneType$"):
        MLAAttention(SMALL)(torch.zeros(4, 32), torch.zeros(5, 4, 1, 20), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda device: MLAMetadataBuilder(4, 4, 64, 12, device),
        lambda device: MLAAttention(SMALL, device=device),
        lambda device: kv_cache.allocate("bf16", 1, 4, device=device),
        lambda device: turboquant.allocate("turboquant_k8v4", 1, 4, 1, 64, device=device),
    ],
    ids=["builder", "layer", "cache", "TurboQuant cache"],
)
def test_an_unknown_or_missing_device_is_named(make):
    with pytest.raises(ValueError, match=r"^device must be an available device, got 'cuda:99': "):
        make("cuda:99")
    with pytest.raises(ValueError, match=r"^device must be a PyTorch device such as .* got 'nope'$"):
        make("nope")
    with pytest.raises(TypeError, match=r"^device must be a torch\.device or its name, got list$"):
        make([])


def test_metadata_on_another_device_is_refused():
    metadata = MLAMetadataBuilder(4, 4, 64, 12, "cpu").build([0, 4], [8], TABLE[:1])
    with pytest.raises(ValueError, match="metadata must be on cpu like the cache, got meta"):
        MLAAttention(SMALL)(torch.zeros(4, 32), torch.zeros(10, 4, 1, 20), metadata.to(torch.device("meta")))
