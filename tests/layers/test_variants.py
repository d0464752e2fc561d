"""Rare features of MLA layers, compared with a plain float64 computation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from layers.stock import Engine, assert_within, hidden_states

from flashlatte import kv_cache
from flashlatte.layers import IndexerConfig, MLAAttention, MLAConfig, MLAMetadataBuilder, Rope

SIZES = MLAConfig(
    hidden_size=32,
    num_attention_heads=3,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    q_lora_rank=12,
    rope=Rope(theta=100.0, max_position=128),
)
VARIANTS = {
    "gate of heads": {"output_gate": "head"},
    "gate of channels": {"output_gate": "channel", "q_lora_rank": None},
    "gate of queries": {"output_gate": "query"},
    "sinks": {"attn_sink": True},
    "sinks and gate": {"attn_sink": True, "output_gate": "head", "q_lora_rank": None},
    "norm of keys' rope": {"key_rope_norm": True, "norm_eps": 1e-2},
    "window": {"window": 5},
    "window longer than requests": {"window": 64, "output_gate": "head"},
    "no rotation": {"rope": Rope(layout="none", max_position=128)},
    "no rope dims": {"qk_rope_head_dim": 0},
    "no rope dims, no query latent": {"qk_rope_head_dim": 0, "q_lora_rank": None, "latent_factor": 2.0},
}


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """x [tokens, ..., dims] as complex numbers of adjacent dims, each rotated by its position and frequency."""
    if rope.layout == "none" or x.shape[-1] == 0:
        return x
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    count = pairs.shape[-1]
    angles = torch.arange(x.shape[0])[:, None] * rope.theta ** (-torch.arange(count, dtype=torch.float64) / count)
    turn = torch.polar(torch.ones_like(angles), angles).view(x.shape[0], *[1] * (x.dim() - 2), count)
    return torch.view_as_real(pairs * turn).flatten(-2)


def expected(layer: MLAAttention, hidden: torch.Tensor) -> torch.Tensor:
    """One request's outputs [n, hidden_size] by the formulas of ``MLAConfig``'s docstring."""
    config, x = layer.config, hidden.double()
    weights = {name: weight.double() for name, weight in layer.named_parameters()}

    def project(name: str, value: torch.Tensor) -> torch.Tensor:
        return value @ weights[f"{name}.weight"].T

    eps, gate = config.norm_eps, None
    if config.q_lora_rank is None:
        query = project("q_proj", x)
    else:
        latent = project("q_a_proj", x)
        normalized = norm(latent, weights["q_a_layernorm.weight"], eps)
        if config.output_gate == "query":
            both = project("q_gate_proj", torch.cat((normalized, latent), -1)).unflatten(-1, (3, -1))
            query, gate = both.split((config.qk_head_dim, config.v_head_dim), -1)
            query = query.flatten(1)
        else:
            query = project("q_b_proj", normalized)
    if config.output_gate == "head":
        gate = project("g_proj", x)[..., None]
    elif config.output_gate == "channel":
        gate = project("gate_proj", x).unflatten(-1, (3, -1))
    q_nope, q_rope = query.unflatten(-1, (3, -1)).split((config.qk_nope_head_dim, config.qk_rope_head_dim), -1)
    c, k_rope = project("kv_a_proj_with_mqa", x).split((config.kv_lora_rank, config.qk_rope_head_dim), -1)
    c = norm(c, weights["kv_a_layernorm.weight"], eps) * config.latent_factor
    if config.key_rope_norm:
        k_rope = norm(k_rope, weights["k_rope_only_layernorm.weight"], eps)
    k_nope, values = (
        project("kv_b_proj", c).unflatten(-1, (3, -1)).split((config.qk_nope_head_dim, config.v_head_dim), -1)
    )
    scores = torch.einsum("qhd,khd->hqk", q_nope, k_nope)
    scores += torch.einsum("qhd,kd->hqk", rotated(q_rope, config.rope), rotated(k_rope, config.rope))
    scores = scores * config.qk_head_dim**-0.5
    visible = torch.ones(len(x), len(x)).tril().triu(-len(x) if config.window is None else 1 - config.window)
    scores = scores.masked_fill(~visible.bool(), -torch.inf)
    if config.attn_sink:
        column = weights["sinks"][:, None, None].expand(-1, len(x), 1)
        scores = torch.cat((scores, column), -1)
    out = torch.einsum("hqk,khv->qhv", scores.softmax(-1)[..., : len(x)], values)
    return project("o_proj", (out if gate is None else out * gate.sigmoid()).flatten(1))


def made(changes: dict[str, object], **options: object) -> MLAAttention:
    config = dataclasses.replace(SIZES, **changes)
    layer = MLAAttention(config, dtype=torch.float32, **options)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(0)
    for name, weight in layer.named_parameters():
        weight.normal_(1.0 if "norm" in name else 0.0, 1.0 if weight.dim() < 2 else 0.3, generator=generator)
    return layer


@pytest.mark.parametrize("cache_format", ["fp32", "fp8"])
@pytest.mark.parametrize("name", VARIANTS)
def test_prefill_and_decode(name, cache_format):
    layer = made(VARIANTS[name])
    window = layer.config.window
    if window is not None and cache_format == "fp8":
        pytest.skip("sparse_decode does not read fp8")
    options = {"workspace_tokens": 8, "max_decode_queries": 2, "windows": () if window is None else (window,)}
    engine = Engine(layer, hidden_states((30, 9, 21), width=32), cache_format, **options)
    engine.step({0: 11, 2: 5})
    engine.step({0: 1, 2: 2, 1: 9})
    engine.step({0: 18, 2: 14})
    # e4m3 values in the history have relative errors of up to 1/16.
    for sequence, result in zip(engine.sequences, engine.results(), strict=True):
        assert_within(result.double(), expected(layer, sequence), 2e-5 if cache_format == "fp32" else 0.15)


@pytest.mark.parametrize("name", VARIANTS)
def test_shards_sum_to_the_layer(name):
    whole = made(VARIANTS[name])
    hidden = hidden_states((17,), width=32)
    total = torch.zeros(17, 32)
    for heads in ((0, 1), (1, 3)):
        shard = MLAAttention(whole.config, heads=heads, dtype=torch.float32)
        shard.load_weights(dict(whole.named_parameters()))
        window = shard.config.window
        total += Engine(shard, hidden, windows=() if window is None else (window,)).step({0: 17})
    assert_within(total.double(), expected(whole, hidden[0]))


def test_sinks_over_a_quantized_cache():
    """``sparse_decode`` over the slots of all tokens, in a format without dense decode."""
    layer = made({"attn_sink": True, "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    engine = Engine(layer, hidden_states((12,), width=32), "v32")
    engine.step({0: 10})
    engine.step({0: 1})
    engine.step({0: 1})
    assert_within(engine.results()[0].double(), expected(layer, engine.sequences[0]), 0.1)


def test_no_rope_dims_over_a_quantized_cache():
    layer = made({"qk_rope_head_dim": 0, "kv_lora_rank": 512})
    engine = Engine(layer, hidden_states((12,), width=32), "fp8")
    engine.step({0: 11})
    engine.step({0: 1})
    assert_within(engine.results()[0].double(), expected(layer, engine.sequences[0]), 0.15)


def test_a_window_needs_its_slots():
    layer = made({"window": 5})
    engine = Engine(layer, hidden_states((9,), width=32), windows=(4,))
    with pytest.raises(ValueError, match=r"window 5: MLAMetadataBuilder\(windows=…\), got \[4\]$"):
        engine.step({0: 9})
    with pytest.raises(ValueError, match="window must be None in a config with an indexer, got 5"):
        dataclasses.replace(SIZES, window=5, indexer=IndexerConfig(num_heads=2, head_dim=32))


def test_a_window_in_a_padded_decode_step():
    """Padding requests have no slots. The buffers are those of the previous step."""
    layer = made({"window": 3})
    hidden = hidden_states((8,), width=32)[0]
    builder = MLAMetadataBuilder(4, 3, 16, 16, "cpu", cache_format="fp32", windows=(3,))
    cache = kv_cache.allocate("fp32", 4, 4, head_dim=layer.config.head_dim)
    table = torch.tensor([[2, 1]])
    layer(hidden[:7], cache, builder.build([0, 7], [7], table))
    metadata = builder.build([0, 1], [8], table, pad_requests_to=3)
    assert metadata.windows[3].tolist() == [[1 * 4 + 1, 1 * 4 + 2, 1 * 4 + 3], [-1] * 3, [-1] * 3]
    out = layer(torch.cat((hidden[7:], torch.zeros(2, 32))), cache, metadata)
    assert_within(out[:1].double(), expected(layer, hidden)[7:])
