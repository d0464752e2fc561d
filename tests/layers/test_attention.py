"""``MLAAttention`` compared with transformers' modules, in float32."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import dataclasses
import itertools

from layers.stock import MODELS, Engine, assert_like_stock, assert_within, hidden_states, layer_like, stock

from flashlatte.kv_cache.sharding import Sharding
from flashlatte.layers import IndexerConfig, MLAAttention, MLAConfig, absorbed


@pytest.fixture(params=MODELS)
def model(request):
    return stock(request.param)


def test_prefill(model):
    engine = Engine(layer_like(model), hidden_states((37, 1, 20)), max_decode_queries=0)
    engine.step({0: 37, 1: 1, 2: 20})
    assert_like_stock(model, engine)


@pytest.mark.parametrize("workspace", [1, 7, 64, 4096])
def test_prefill_in_parts_over_chunked_context(model, workspace):
    engine = Engine(
        layer_like(model), hidden_states((50, 9, 41)), max_decode_queries=0, workspace_tokens=workspace, page_size=8
    )
    engine.step({0: 20, 2: 5})
    engine.step({2: 16, 0: 17, 1: 9})
    engine.step({0: 13, 2: 20})
    assert_like_stock(model, engine)


def test_decode_after_prefill(model):
    engine = Engine(layer_like(model), hidden_states((53, 45, 41)))
    engine.step({0: 13, 1: 5, 2: 1})
    for _ in range(40):
        engine.step({0: 1, 1: 1, 2: 1})
    assert_like_stock(model, engine)


def test_mixed_batches_of_decode_and_prefill(model):
    engine = Engine(layer_like(model), hidden_states((40, 30, 60, 25)), max_decode_queries=2, workspace_tokens=16)
    engine.step({0: 11})
    engine.step({0: 1, 2: 25})
    engine.step({0: 1, 1: 30, 2: 20})
    engine.step({2: 1, 0: 1, 3: 25})
    engine.step({0: 2, 2: 2})
    assert_like_stock(model, engine)


def test_speculative_decode_of_three_tokens(model):
    engine = Engine(layer_like(model), hidden_states((30, 22)), max_decode_queries=3)
    engine.step({0: 9, 1: 4})
    for _ in range(6):
        engine.step({0: 3, 1: 3})
    assert_like_stock(model, engine)


def test_decode_requests_with_different_numbers_of_tokens(model):
    engine = Engine(layer_like(model), hidden_states((30, 22, 40)), max_decode_queries=3)
    engine.step({0: 9, 1: 4, 2: 6})
    engine.step({0: 3, 1: 1, 2: 2})
    engine.step({1: 2, 0: 3, 2: 10})
    assert_like_stock(model, engine)


def test_rejected_speculation_is_overwritten():
    model = stock("v3")
    engine = Engine(layer_like(model), hidden_states((30,)))
    engine.step({0: 20})
    draft = engine.sequences[0].clone()
    engine.sequences[0][21:23] = 7.0
    engine.step({0: 3})
    # Two of the three were wrong.
    engine.outputs[0][-1] = engine.outputs[0][-1][:1]
    engine.done[0] -= 2
    engine.sequences[0] = draft
    engine.step({0: 3})
    assert_like_stock(model, engine)


def test_a_prefix_that_two_requests_share():
    model = stock("v3")
    first, second = hidden_states((40, 40))
    second[:16] = first[:16]
    engine = Engine(layer_like(model), (first, second), page_size=8, max_decode_queries=1)
    engine.step({0: 40})
    engine.table[1, :2] = engine.table[0, :2]
    engine.done[1] = 16
    engine.step({1: 24})
    expected = model(second)[16:]
    assert_within(engine.results()[1], expected)


def test_tokens_without_a_slot_are_not_stored():
    model = stock("v3")
    engine = Engine(layer_like(model), hidden_states((12,)), page_size=4, max_decode_queries=0)
    metadata = engine.builder.build([0, 12], [12], engine.table, torch.tensor([*range(8), -1, -1, -1, -1]))
    out = engine.layer(engine.sequences[0], engine.cache, metadata)
    assert_within(out, model(engine.sequences[0]))
    assert int(engine.cache.isnan().any(dim=-1).sum()) == 4


@pytest.mark.parametrize("shards", [(0, 4), (0, 1, 4), (0, 2, 3, 4)])
@pytest.mark.parametrize("name", ["v2-lite", "v3-half-bias"])
def test_shards_of_heads_sum_to_the_layer(name, shards):
    model, sequences = stock(name), hidden_states((30, 20))
    total: torch.Tensor | float = 0.0
    for first, last in itertools.pairwise(shards):
        engine = Engine(layer_like(model, heads=(first, last)), sequences, max_decode_queries=1, workspace_tokens=8)
        engine.step({0: 12, 1: 19})
        engine.step({1: 1, 0: 18})
        total = total + torch.cat(engine.results())
    assert isinstance(total, torch.Tensor)
    assert_within(total, torch.cat([model(sequence) for sequence in sequences]))


@pytest.mark.parametrize(("name", "topk"), [("v3", 40), ("glm4", 5)])
def test_given_indices_select_the_visible_tokens(name, topk):
    """Compared with the stock module under a mask that hides the other tokens."""
    model = stock(name)
    (hidden,) = hidden_states((24,))
    engine = Engine(layer_like(model), (hidden,), page_size=8)
    generator = torch.Generator().manual_seed(3)
    kept = (torch.rand(24, 24, generator=generator) < 0.5).tril() | torch.eye(24, dtype=torch.bool)
    positions = torch.where(kept, torch.arange(24), -1).sort(dim=1, descending=True).values
    positions = torch.nn.functional.pad(positions, (0, 40), value=-1)[:, :topk]
    chosen = torch.zeros(24, 25, dtype=torch.bool).scatter(1, positions.where(positions >= 0, 24), True)[:, :24]
    slots = torch.where(positions < 0, -1, engine.table[0][positions.clamp(min=0) // 8] * 8 + positions % 8)
    engine.step({0: 20}, indices=slots[:20])
    engine.step({0: 4}, indices=slots[20:])
    assert model.rope is not None
    rotation = model.rope(hidden[None], torch.arange(24)[None])
    mask = torch.zeros(24, 24).masked_fill(~chosen, -torch.inf)[None, None]
    with torch.no_grad():
        expected = model.module(hidden[None], position_embeddings=rotation, attention_mask=mask)[0][0]
    assert_within(engine.results()[0], expected)


def test_an_idle_step_does_not_change_the_cache():
    model = stock("v3")
    engine = Engine(layer_like(model), hidden_states((12,)))
    engine.step({0: 5})
    before = engine.cache.clone()
    metadata = engine.builder.build([0], [], engine.table[:0])
    assert engine.layer(torch.empty(0, 64), engine.cache, metadata).shape == (0, 64)
    torch.testing.assert_close(engine.cache, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("cache_format", "rank", "rope"), [("fp32", 32, 8), ("v32", 512, 64)])
def test_an_idle_step_in_a_captured_batch(cache_format, rank, rope):
    model = stock("v3", (("kv_lora_rank", rank), ("qk_rope_head_dim", rope)))
    engine = Engine(layer_like(model), hidden_states((12, 9)), cache_format)
    engine.step({0: 5, 1: 2})
    before = engine.cache.clone()
    metadata = engine.builder.build([0], [], engine.table[:0], pad_requests_to=2)
    out = engine.layer(torch.zeros(2, 64), engine.cache, metadata, cache_format=cache_format)
    assert out.shape == (2, 64)
    assert not out.isnan().any()
    torch.testing.assert_close(engine.cache, before, rtol=0, atol=0, equal_nan=True)


def test_requests_without_new_tokens_change_nothing():
    model = stock("v3")
    engine = Engine(layer_like(model), hidden_states((30, 22, 40)), max_decode_queries=3)
    engine.step({0: 9, 1: 4, 2: 6})
    engine.step({0: 0, 1: 1, 2: 2})
    engine.step({1: 2, 0: 0, 2: 10})
    engine.step({0: 12, 2: 0, 1: 9})
    assert_like_stock(model, engine)


def test_w_uk_and_w_uv_are_views_of_kv_b():
    layer = layer_like(stock("v3"))
    storage = layer.kv_b_proj.weight.untyped_storage().data_ptr()
    assert layer.w_uk.untyped_storage().data_ptr() == layer.w_uv.untyped_storage().data_ptr() == storage
    assert layer.w_uk.shape == (4, 16, 32)
    assert layer.w_uv.shape == (4, 12, 32)
    per_head = torch.cat((layer.w_uk, layer.w_uv), dim=1).flatten(0, 1)
    assert torch.equal(per_head, layer.kv_b_proj.weight)


def test_softmax_scale_of_the_stock_module(model):
    assert MLAConfig.from_transformers(model.config).softmax_scale == pytest.approx(model.module.scaling, rel=1e-12)


def test_metadata_whose_buffers_hold_another_step_is_refused():
    engine = Engine(layer_like(stock("v3")), hidden_states((20, 30)), "fp32")
    first = engine.builder.build([0, 2], [2], engine.table[:1])
    engine.builder.build([0, 2], [2], engine.table[1:2])
    with pytest.raises(ValueError, match=r"^metadata must be the last one its builder built"):
        engine.layer(torch.zeros(2, engine.layer.config.hidden_size), engine.cache, first)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("operation", ["dense_decode", "sparse_decode"])
def test_batch_invariance_is_passed_to_decode(batch_invariant, operation, monkeypatch):
    """The flag is passed on; its effect is tested with the operations."""
    calls = []
    run = getattr(absorbed, operation)
    monkeypatch.setattr(absorbed, operation, lambda *args, **kwargs: [calls.append(kwargs), run(*args, **kwargs)][1])
    model = stock("v3")
    engine = Engine(layer_like(model, batch_invariant=batch_invariant), hidden_states((9, 4)))
    if operation == "dense_decode":
        engine.step({0: 8, 1: 3})
        engine.step({0: 1, 1: 1})
        assert_like_stock(model, engine)
    else:
        engine.step({0: 4, 1: 2}, indices=torch.zeros(6, 1, dtype=torch.int32))
    assert [one["batch_invariant"] for one in calls] == [batch_invariant] * len(calls)
    assert calls


def test_batch_invariance_is_rejected_for_unsupported_models():
    indexed = MLAConfig(64, 4, q_lora_rank=24, indexer=IndexerConfig(num_heads=4, head_dim=64, topk=8))
    with pytest.raises(ValueError, match="batch_invariant needs a config without an indexer"):
        MLAAttention(indexed, batch_invariant=True)
    with pytest.raises(TypeError, match="batch_invariant must be"):
        MLAAttention(MLAConfig(64, 4), batch_invariant=1)  # type: ignore[arg-type]


def decode_over_fp8(**options):
    """Outputs of a prefill, a decode step of two requests and one of two tokens each, and the engine."""
    model = stock("v3", (("kv_lora_rank", 64),))
    engine = Engine(layer_like(model, **options), hidden_states((24, 12)), "fp8")
    engine.step({0: 21, 1: 9})
    prefilled = engine.results()
    engine.step({0: 1, 1: 1})
    engine.step({0: 2, 1: 2})
    return prefilled, [result[len(first) :] for result, first in zip(engine.results(), prefilled, strict=True)], engine


def test_decode_precision_affects_decode_only(monkeypatch):
    prefilled, exact, _ = decode_over_fp8()
    prefilled_fp8, rounded, engine = decode_over_fp8(decode_precision="fp8")
    assert all(torch.equal(a, b) for a, b in zip(prefilled, prefilled_fp8, strict=True))
    for a, b in zip(exact, rounded, strict=True):
        # Rounding of queries and probabilities to 4 bits.
        assert 1e-3 < ((a - b).norm() / a.norm()).item() < 0.1

    precisions = []
    run = absorbed.dense_decode
    monkeypatch.setattr(absorbed, "dense_decode", lambda *a, **k: [precisions.append(k["precision"]), run(*a, **k)][1])
    decode_over_fp8(decode_precision="fp8", batch_invariant=True)
    assert precisions == ["fp8", "fp8"]

    with pytest.raises(ValueError, match=r"for sparse_decode, got fp8$"):
        engine.layer(
            torch.zeros(4, engine.layer.config.hidden_size),
            engine.cache,
            engine.metadata,
            indices=torch.zeros(4, 1, dtype=torch.int32),
        )


@pytest.mark.parametrize("cache_format", ["bf16", "fp32"])
def test_decode_precision_over_another_cache(cache_format):
    engine = Engine(layer_like(stock("v3"), decode_precision="fp8"), hidden_states((4,)), cache_format)
    with pytest.raises(ValueError, match=f"^decode_precision='fp8' needs a cache of format fp8, got {cache_format}$"):
        engine.step({0: 3})


@pytest.mark.parametrize(
    ("options", "precision", "message"),
    [
        ({}, "bf16", r"^decode_precision must be None or 'fp8', got 'bf16'$"),
        ({}, torch.float8_e4m3fn, "^decode_precision must be None or 'fp8', got torch"),
        (
            {"indexer": IndexerConfig(num_heads=4, head_dim=64, topk=8)},
            "fp8",
            "needs a config without indexer, got Ind",
        ),
        ({"window": 16}, "fp8", "^decode_precision='fp8' needs a config without window, got 16$"),
        ({"attn_sink": True}, "fp8", "^decode_precision='fp8' needs a config without attn_sink, got True$"),
    ],
)
def test_decode_precision_that_is_refused(options, precision, message):
    with pytest.raises(ValueError, match=message):
        MLAAttention(MLAConfig(64, 4, q_lora_rank=24, **options), decode_precision=precision)


@pytest.mark.parametrize("option", [{"batch_invariant": True}, {"decode_precision": "fp8"}])
def test_options_that_need_a_whole_cache(option):
    engine = Engine(layer_like(stock("v3"), **option), hidden_states((4,)), "fp8")
    engine.step({0: 3})
    metadata = dataclasses.replace(engine.metadata, sharding=Sharding(0, 2, 1))
    hidden = torch.zeros(3, engine.layer.config.hidden_size)
    with pytest.raises(ValueError, match=f"^{next(iter(option))} needs a whole cache, got metadata for Sharding"):
        engine.layer(hidden, engine.cache, metadata)


def test_rows_without_keys_stay_zero_with_any_sink():
    out, lse = torch.ones(2, 3, 4), torch.full((2, 3), 2.0)
    out[1], lse[1] = 0.0, -torch.inf
    absorbed.apply_sink(out, lse, torch.tensor([2.0, -torch.inf, torch.inf]))
    assert out[:, :, 0].tolist() == [[0.5, 1.0, 0.0], [0.0, 0.0, 0.0]]
