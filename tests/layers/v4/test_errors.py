"""Errors for a layer, caches and a step that do not match."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashlatte.layers import Rope, V4Attention, V4Cache, V4Config, V4IndexerConfig, V4Step

CONFIG = V4Config(
    hidden_size=16,
    q_lora_rank=8,
    num_attention_heads=2,
    head_dim=16,
    rope_dim=4,
    o_groups=1,
    o_lora_rank=4,
    window=4,
    indexer=V4IndexerConfig(2, 32, 2),
)
TABLE = torch.arange(4).view(1, 4)


def call(
    config=CONFIG,
    cache_config=CONFIG,
    page_size=4,
    ratio=4,
    window=4,
    hidden=16,
    other_caches=(),
    table=TABLE,
    groups_table=TABLE,
    first=0,
):
    """The layer's output; ``other_caches`` gives, by name, the number of pages to keep of a cache, or None for none."""
    groups = {ratio: (groups_table, TABLE)}
    ids = torch.zeros(3, dtype=torch.int32)
    step = V4Step.build(ids, torch.arange(first, first + 3), table, groups, window=window, page_size=4)
    cache = V4Cache.allocate(cache_config, 4, page_size, state_pages=4, cache_format="fp32")
    cache = dataclasses.replace(cache, **{name: pages and getattr(cache, name)[:pages] for name, pages in other_caches})
    return V4Attention(config)(torch.zeros(3, hidden), step, cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 8}, r"^hidden must have shape \[3, 16\]"),
        ({"window": 5}, "^step must have the layer's window of 4 tokens, got 5$"),
        ({"ratio": 8}, r"^step must have groups of the layer's 4 tokens, got \[8\]$"),
        ({"page_size": 8}, "^cache.window must have the step's pages of 4, got 8$"),
        (
            {"cache_config": dataclasses.replace(CONFIG, ratio=0, indexer=None)},
            "^cache.groups must be a tensor in this layer$",
        ),
        ({"cache_config": dataclasses.replace(CONFIG, indexer=None)}, "^cache.index_keys must be a tensor in this"),
        ({"config": dataclasses.replace(CONFIG, ratio=0, indexer=None)}, "^cache.groups must be None in this layer$"),
        ({"other_caches": [("index_states", None)]}, "^cache.index_states must be a tensor in this layer$"),
        (
            {"other_caches": [("index_keys", 3)]},
            "^cache.index_keys must have cache.groups's 4 pages of 4, got 3 of 4$",
        ),
        (
            {"other_caches": [("index_states", 2)]},
            "^cache.index_states must have cache.states's 4 pages of 4, got 2 of 4$",
        ),
        ({"table": TABLE + 4}, "^cache.window must have at least 5 pages for this step, got 4$"),
        (
            {"other_caches": [("groups", 1), ("index_keys", 1)], "groups_table": TABLE + 1, "first": 1},
            "^cache.groups must have at least 2 pages for this step, got 1$",
        ),
    ],
)
def test_inconsistent_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        call(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": 0}, "^indexer must be None in a layer with ratio 0"),
        ({"rope_dim": 18}, "^rope_dim must be even and at most head_dim 16, got 18$"),
        ({"o_groups": 3}, "^o_groups must divide 2 heads, got 3$"),
        ({"rope": Rope(layout="half")}, "^rope.layout must be 'interleaved', got 'half'$"),
        ({"indexer": V4IndexerConfig(2, 32, 2), "rope_dim": 64, "head_dim": 64}, "^indexer.head_dim must be at least"),
    ],
)
def test_configs(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize("known", [False, True])
def test_positions_beyond_the_rotary_embedding(known):
    config = dataclasses.replace(CONFIG, rope=Rope(max_position=7))
    cache = V4Cache.allocate(config, 4, 4, state_pages=4, cache_format="fp32")
    attention, groups = V4Attention(config), {4: (TABLE, TABLE)}
    for last in (6, 7):
        if known:
            step = V4Step.from_spans([(last - 1, last + 1)], TABLE, groups, window=4, page_size=4)
        else:
            ids = torch.zeros(2, dtype=torch.int32)
            step = V4Step.build(ids, torch.tensor([last - 1, last]), TABLE, groups, window=4, page_size=4)
        if last == 6:
            attention(torch.zeros(2, 16), step, cache)
            continue
        with pytest.raises(
            ValueError, match=r"^step must have rotary positions below the config's rope.max_position 7, got 7$"
        ):
            attention(torch.zeros(2, 16), step, cache)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("window", "groups", "end", "message"),
    [
        (3, 4, 12, None),
        (3, 4, 13, "^window_table must have room for 13 tokens of a request, got 3 pages of 4$"),
        # An incomplete group needs no slot yet.
        (4, 1, 11, None),
        (4, 1, 12, r"^group_tables\[4\]\[0\] must have room for 3 groups of a request, got 1 pages of 2$"),
    ],
)
def test_more_tokens_than_the_tables_hold(known, window, groups, end, message):
    tables = TABLE[:, :window], {4: (TABLE[:, :groups], TABLE)}
    sizes = {"window": 4, "page_size": 4, "group_page_sizes": {4: 2}}

    def step():
        if known:
            return V4Step.from_spans([(end - 3, end)], *tables, **sizes)
        return V4Step.build(torch.zeros(3, dtype=torch.int32), torch.arange(end - 3, end), *tables, **sizes)

    if message is None:
        assert step().num_tokens == 3
        return
    with pytest.raises(ValueError, match=message):
        step()


def test_a_plain_cache_has_the_layers_dtype():
    step = V4Step.from_spans([(0, 3)], TABLE, {4: (TABLE, TABLE)}, window=4, page_size=4)
    cache = V4Cache.allocate(CONFIG, 4, 4, state_pages=4, cache_format="fp16")
    with pytest.raises(TypeError, match=r"^cache.window must be quantized or float32 like the layer, got float16$"):
        V4Attention(CONFIG)(torch.zeros(3, 16), step, cache)
    assert not cache.window.any()


def test_hidden_states_have_the_layers_dtype():
    step = V4Step.from_spans([(0, 3)], TABLE, {4: (TABLE, TABLE)}, window=4, page_size=4)
    cache = V4Cache.allocate(CONFIG, 4, 4, state_pages=4, cache_format="fp32")
    with pytest.raises(TypeError, match=r"^hidden must be float32 like the layer, got float16$"):
        V4Attention(CONFIG)(torch.zeros(3, 16, dtype=torch.float16), step, cache)


def test_shared_tokens_are_of_each_request():
    with pytest.raises(ValueError, match=r"^shared_tokens must have shape \[1\]"):
        V4Step.from_spans([(3, 5)], TABLE, {4: (TABLE, TABLE)}, shared_tokens=torch.zeros(2, dtype=torch.int64))


def test_an_indexers_head_dim():
    with pytest.raises(ValueError, match=r"^head_dim of an indexer must be 32, 64 or 128, got 48$"):
        V4IndexerConfig(head_dim=48)


def test_formats_of_other_rows_are_refused():
    with pytest.raises(ValueError, match=r"^head_dim of format model1 is 512, got 16$"):
        V4Cache.allocate(CONFIG, 4)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (V4Attention, {"config": None}, "^config must be of type V4Config, got NoneType$"),
        (V4Attention, {"config": V4Config(), "backend": "cuda"}, "^backend must be one of hopper, "),
        (V4Attention, {"config": V4Config(), "device": []}, "^device must be a torch.device or its name, got list$"),
        (V4Cache.allocate, {"config": 5, "pages": 1}, "^config must be of type V4Config, got int$"),
        (V4Config, {"rope": 5}, "^rope must be of type Rope, got int$"),
        (V4Config, {"indexer": 5}, "^indexer must be of type V4IndexerConfig or None, got int$"),
    ],
)
def test_unsupported_configs_of_a_layer(make, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(**arguments)
