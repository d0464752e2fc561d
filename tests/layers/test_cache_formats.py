"""The layer over quantized caches: its error relative to the stock module, which comes from rounding only."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from layers.stock import Engine, assert_within, hidden_states, layer_like, stock

from flashlatte import kv_cache

# Largest difference accepted, as a share of the largest number of the stock module's float32 output. A rounding of a
# key moves scores by as much as the softmax scale times the query's length. Seen: 0.0035, 0.0006, 0.052, 0.028, 0.031.
BOUNDS = {"bf16": 0.006, "fp16": 0.001, "fp8": 0.08, "v32": 0.05, "model1": 0.05}


def model_for(cache_format):
    rank = {"v32": 512, "model1": 448}.get(cache_format, 32)
    rope = 64 if rank > 32 else 8
    return stock("v3", (("kv_lora_rank", rank), ("qk_rope_head_dim", rope)))


def run(engine):
    engine.step({0: 30, 1: 8})
    engine.step({1: 1, 0: 12})
    for _ in range(4):
        engine.step({0: 1, 1: 1})
    engine.step({0: 3, 1: 3})
    return torch.cat(engine.results()).float()


@pytest.mark.parametrize("cache_format", BOUNDS)
def test_float32_model_over_a_cache_that_rounds(cache_format):
    model, sequences = model_for(cache_format), hidden_states((49, 16))
    engine = Engine(layer_like(model), sequences, cache_format, max_decode_queries=3, workspace_tokens=10)
    result = run(engine)
    expected = torch.cat([model(sequence) for sequence in sequences])
    assert_within(result, expected, BOUNDS[cache_format])
    assert (result - expected).abs().max() > 1e-6


@pytest.mark.parametrize("cache_format", ["bf16", "v32"])
def test_bfloat16_model(cache_format):
    """bf16 weights, activations and cache, compared with the float32 stock module with the same rounded weights."""
    model, sequences = model_for(cache_format), hidden_states((49, 16))
    engine = Engine(
        layer_like(model, dtype=torch.bfloat16), sequences, cache_format, max_decode_queries=3, workspace_tokens=10
    )
    expected = torch.cat([model(sequence) for sequence in sequences])
    assert_within(run(engine), expected, {"bf16": 0.025, "v32": 0.045}[cache_format])


def test_decode_over_v32_reads_what_was_written():
    """Compared with the float32 layer over the dequantized cache: only float32 rounding differs."""
    model, sequences = model_for("v32"), hidden_states((20,))
    quantized = Engine(layer_like(model), sequences, "v32", max_decode_queries=3)
    exact = Engine(layer_like(model), sequences, "fp32", max_decode_queries=3)
    for engine in (quantized, exact):
        engine.step({0: 17})
    exact.cache.copy_(kv_cache.unpack(quantized.cache, dtype=torch.float32))
    results = []
    for engine in (quantized, exact):
        engine.step({0: 1})
        results.append(engine.results()[0][-1:])
        engine.cache = engine.cache.clone()
    # The token's own row is rounded in one of the two.
    assert_within(results[0], results[1], 0.001)


def test_fp8_with_a_scale():
    model, sequences = model_for("fp8"), hidden_states((40,))
    results = []
    for scale in (0.02, torch.tensor([0.02])):
        engine = Engine(layer_like(model), sequences, "fp8", max_decode_queries=1, workspace_tokens=9)
        engine.step({0: 20}, k_scale=scale)
        engine.step({0: 19}, k_scale=scale)
        engine.step({0: 1}, k_scale=scale)
        results.append(engine.results()[0])
    assert_within(results[0], model(sequences[0]), 0.08)
    torch.testing.assert_close(*results)
