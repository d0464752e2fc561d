"""DeepSeek-V4.1's layers compared with a float64 reference over whole requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layers.v41.model import FIELDS, PAGE_SIZE, SIZES, Model, hidden_states, steps_of
from support import v41_reference

from flashlatte.layers.v4 import WorkspaceLimits
from flashlatte.layers.v4.builder import V4Builder
from flashlatte.testing import byte_oracles


def wanted(fields, weights, hidden, **stored):
    """The reference's outputs [layers][requests]."""
    by_request = [v41_reference.outputs(fields, weights, of, **stored) for of in zip(*hidden, strict=True)]
    return [list(one) for one in zip(*by_request, strict=True)]


def outputs(model, hidden, steps, limits=None, padding=0):
    """The layers' outputs of all tokens, [layers][requests]."""
    parts = [model.run(hidden, spans, limits, padding) for spans in steps]
    requests = range(len(hidden[0]))
    return [
        [torch.cat([part[layer][request] for part in parts]) for request in requests] for layer in range(len(hidden))
    ]


def assert_close(found, expected, rtol=1e-4, atol=1e-4):
    for layer, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for out, reference in zip(ours, theirs, strict=True):
            torch.testing.assert_close(
                out.double(), reference, rtol=rtol, atol=atol, msg=lambda text, layer=layer: f"layer {layer}: {text}"
            )


@pytest.mark.parametrize("fields", SIZES, ids=("shared", "own", "candidates"))
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_every_token_of_mixed_batches(fields, seed):
    """Prefill, chunked prefill and decode, over pages and over a workspace."""
    weights, lengths = v41_reference.random_weights(fields, seed), [43, 1, 30]
    hidden = hidden_states(fields, lengths, seed)
    expected = wanted(fields, weights, hidden)
    whole, split = [[(0, n) for n in lengths]], steps_of(lengths, seed)
    for steps, limits in (
        (whole, None),
        (split, None),
        (split, WorkspaceLimits(min_queries=2)),
        (whole, WorkspaceLimits(min_queries=2, max_rows=120)),
    ):
        model = Model(fields, weights, len(lengths), max(lengths))
        assert_close(outputs(model, hidden, steps, limits, padding=2 if limits is None else 0), expected)


@pytest.mark.full
def test_rolled_back_tokens():
    """Drafts complete groups, whose rows are rewritten when other tokens replace them."""
    weights = v41_reference.random_weights(FIELDS, 0)
    hidden = hidden_states(FIELDS, [30], 0)
    model = Model(FIELDS, weights, 1, 40)
    found = []
    for begin in range(0, 30, 3):
        kept = begin + 3
        drafts = [[torch.cat((of[0][:kept], torch.randn(5, 48)))] for of in hidden]
        found.append(model.run(drafts, [(begin, kept + 5)]))
    together = [[torch.cat([one[layer][0][:3] for one in found])] for layer in range(len(hidden))]
    assert_close(together, wanted(FIELDS, weights, hidden))


@pytest.mark.parametrize("shared", [16, 20])
def test_a_prefix_whose_pages_are_cached(shared):
    """Groups do not overlap: a request continues after another request's pages without replaying tokens."""
    weights = v41_reference.random_weights(FIELDS, 0)
    hidden = hidden_states(FIELDS, [32, 40], 0)
    for of in hidden:
        of[1][:shared] = of[0][:shared]
    model = Model(FIELDS, weights, 2, 40)
    model.run(hidden, [(0, 32), (0, 0)])
    model.table[1, : shared // PAGE_SIZE] = model.table[0, : shared // PAGE_SIZE]
    found = model.run(hidden, [(32, 32), (shared, 40)])
    expected = wanted(FIELDS, weights, hidden)
    assert_close([[of[1]] for of in found], [[of[1][shared:]] for of in expected])


def test_steps_of_the_builder():
    """Prefill, and decode in padded steps, with one block table for tokens and groups and states by request."""
    weights, lengths = v41_reference.random_weights(FIELDS, 0), [15, 9]
    hidden = hidden_states(FIELDS, lengths, 0)
    model = Model(FIELDS, weights, len(lengths), max(lengths))
    builder = V4Builder(model.configs, PAGE_SIZE, 4, model.table.shape[1], torch.device("cpu"))

    def run(spans, **options):
        metadata = builder.build(spans, model.table, [2, 0], **options)
        caches = [
            _with_small_pages(cache, config, states)
            for cache, config, (states, _) in zip(model.caches, model.configs, metadata.states, strict=True)
        ]
        return model.run(
            hidden, spans, step=metadata.step(), caches=caches, padding=metadata.num_tokens - tokens(spans)
        )

    def tokens(spans):
        return sum(end - begin for begin, end in spans)

    parts = [run([(0, 9), (0, 3)])]
    parts += [run([(9 + i, 10 + i), (3 + i, 4 + i)], pad_requests_to=4) for i in range(6)]
    found = [[torch.cat([part[layer][r] for part in parts]) for r in range(2)] for layer in range(len(hidden))]
    assert_close(found, wanted(FIELDS, weights, hidden))


def _with_small_pages(cache, config, states):
    """The cache with as many groups in a page as tokens of a page form."""
    if config.ratio == 0:
        return cache
    groups, keys = cache.groups[:, : PAGE_SIZE // config.ratio], cache.index_keys
    keys = None if keys is None else keys[:, : PAGE_SIZE // config.ratio]
    return replace(cache, groups=groups, index_keys=keys, states=states)


@pytest.mark.parametrize("group_format", ["v41", "v41_fp4"])
def test_pages_of_528_and_288_bytes(group_format):
    """Rows are stored as the formats' oracles encode them. Few of 400,000 values are rounded to the other side, since
    layers compute in float32."""
    # All groups are selected, which the index keys' rounding does not change.
    changes = {
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "index_topk": 32,
        "candidate_topk_blocks": 8,
    }
    fields = FIELDS | changes | {"num_hidden_layers": 5, "compress_ratios": [0, 2, 2, 1, 1]}
    fields |= {"kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 4], "candidate_source_layer_id": 3}
    codecs = {
        "v41": (byte_oracles.v41_encode, byte_oracles.v41_decode),
        "v41_fp4": (byte_oracles.v41_fp4_encode, byte_oracles.v41_fp4_decode),
    }

    def stored(rows, cache):
        encode, decode = codecs["v41" if cache == "window" else group_format]
        return torch.tensor([decode(encode(row)) for row in rows.float().tolist()], dtype=torch.float64)

    weights = v41_reference.random_weights(fields, 0, std=0.1)
    hidden = hidden_states(fields, [21], 0)
    expected = wanted(fields, weights, hidden, stored=stored)
    unrounded = wanted(fields, weights, hidden)
    for limits in (None, WorkspaceLimits(min_queries=2)):
        model = Model(fields, weights, 1, 24, cache_format="v41", group_format=group_format)
        for found, theirs, exact in zip(
            outputs(model, hidden, steps_of([21], 1), limits), expected, unrounded, strict=True
        ):
            error = (found[0] - theirs[0]).norm(dim=-1) / theirs[0].norm(dim=-1)
            assert error.max() < 2e-3
            assert ((exact[0] - theirs[0]).norm(dim=-1) / theirs[0].norm(dim=-1)).max() > 5e-3
