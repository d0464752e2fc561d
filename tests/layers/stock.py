"""Attention modules of transformers with random weights, and a driver that runs a layer on the same tokens."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from flashlatte import kv_cache
from flashlatte.layers import MLAAttention, MLAConfig, MLAMetadataBuilder

# Largest accepted difference, relative to the largest element of the stock module's output.
RELATIVE = 2e-5

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 512,
}
# Queries grow every 8 positions.
MISTRAL = {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 8, "partial_rotary_factor": 8 / 24}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("DeepseekV2", {}),
    "v2-lite": ("DeepseekV2", {"q_lora_rank": None, "rope_parameters": YARN}),
    "v3": ("DeepseekV3", {}),
    "v3-yarn": ("DeepseekV3", {"rope_parameters": YARN}),
    "v3-half-bias": ("DeepseekV3", {"rope_interleave": False, "attention_bias": True}),
    "youtu": ("Youtu", {}),
    "axk1": ("AXK1", {}),
    "longcat": ("LongcatFlash", {"head_dim": 8}),
    "minicpm3": ("MiniCPM3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "mistral4": ("Mistral4", {"rope_parameters": YARN | MISTRAL}),
    "ling3": ("BailingHybrid", {"q_lora_rank": 24}),
    "ling3-direct": ("BailingHybrid", {"q_lora_rank": None}),
    "kimi-linear": ("KimiLinear", {"q_lora_rank": None}),
    "glm4": ("Glm4MoeLite", {"qk_nope_head_dim": 24, "v_head_dim": 16}),
}

# Many heads, so that scores with only negative products, which are 0, are rare.
INDEXED = {"index_n_heads": 32, "index_head_dim": 32, "index_topk": 8, "num_hidden_layers": 4}
INDEXED_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v32": ("DeepseekV32", INDEXED),
    "v32-yarn": ("DeepseekV32", INDEXED | {"rope_parameters": YARN}),
    "glm5": ("GlmMoeDsa", INDEXED | {"rope_interleave": False}),
    "axk2": ("AXK2", INDEXED),
    "hy4": ("HYV4", INDEXED | {"rms_norm_eps": 1e-3}),
}


class Stock:
    """A transformers attention module in float32."""

    def __init__(self, family: str, options: dict[str, Any]) -> None:
        transformers = pytest.importorskip("transformers")
        if not hasattr(transformers, f"{family}Config"):
            pytest.skip(f"transformers {transformers.__version__} has no {family}")
        self.config = getattr(transformers, f"{family}Config")(**SIZES | options, attn_implementation="eager")
        name = self.config.model_type
        host = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        attention = getattr(host, f"{family}Attention", None) or getattr(host, f"{family}MLA")
        self.config._attn_implementation = "eager"
        generator = torch.Generator().manual_seed(0)
        self.module = attention(self.config, layer_idx=0).eval().requires_grad_(False)
        for name, weight in self.module.named_parameters():
            spread = 1.0 if weight.dim() < 2 else 2.0 / weight.shape[-1] ** 0.5
            weight.normal_(
                1.0 if "norm" in name and name.endswith("weight") else 0.0,
                0.2 if weight.dim() < 2 else spread,
                generator=generator,
            )
        rope = getattr(host, f"{family}RotaryEmbedding", None)
        self.rope = None if rope is None else rope(self.config)

    @torch.no_grad()
    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """The output [n, hidden_size] for one request's tokens [n, hidden_size]."""
        count = hidden.shape[0]
        ids = torch.arange(count)[None]
        positions = None if self.rope is None else self.rope(hidden[None], ids)
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        return self.module(hidden[None], position_embeddings=positions, attention_mask=mask, position_ids=ids)[0][0]


@functools.cache
def stock(name: str, options: tuple[tuple[str, Any], ...] = ()) -> Stock:
    family, chosen = (MODELS | INDEXED_MODELS)[name]
    return Stock(family, chosen | dict(options))


def layer_like(model: Stock, **options: Any) -> MLAAttention:
    """An ``MLAAttention`` with the stock module's weights."""
    dtype = options.get("dtype", torch.float32)
    layer = MLAAttention(MLAConfig.from_transformers(model.config), **options | {"dtype": dtype})
    layer.load_weights(model.module.state_dict())
    return layer


def hidden_states(lengths: Sequence[int], width: int = SIZES["hidden_size"], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, width, generator=generator) for length in lengths]


class Engine:
    """Batches requests' tokens for a layer, with its paged cache, like a serving engine.

    Args:
        sequences: hidden states of each request.
        index_format: format of the index keys, if the layer has an indexer.
    """

    def __init__(
        self,
        layer: MLAAttention,
        sequences: Sequence[torch.Tensor],
        cache_format: str = "fp32",
        page_size: int = 4,
        index_format: str = "index_fp32",
        **options: Any,
    ) -> None:
        self.layer, self.sequences = layer, [sequence.to(layer.o_proj.weight.dtype) for sequence in sequences]
        max_length = max(len(sequence) for sequence in sequences)
        pages = -(-max_length // page_size)
        count = len(sequences)
        self.table = torch.randperm(count * pages, generator=torch.Generator().manual_seed(1)).view(count, pages)
        head_dim = None if cache_format in ("v32", "model1") else layer.config.head_dim
        self.cache_format = cache_format
        self.cache = kv_cache.allocate(cache_format, count * pages, page_size, head_dim=head_dim)
        if not cache_format.startswith(("v32", "model1", "fp8")):
            self.cache.fill_(torch.nan)
        indexer = layer.config.indexer
        self.index_cache = None
        if layer.indexer is not None and indexer is not None:
            self.index_cache = kv_cache.allocate(index_format, count * pages, page_size, head_dim=indexer.head_dim)
            self.index_cache.view(torch.uint8).fill_(255)  # NaN
        self.builder = MLAMetadataBuilder(
            page_size,
            count,
            sum(map(len, sequences)),
            max_length,
            "cpu",
            **{
                "cache_format": cache_format,
                "num_pages": count * pages,
                "topk": None if indexer is None else indexer.topk,
            }
            | options,
        )
        self.done = [0] * count
        self.outputs: list[list[torch.Tensor]] = [[] for _ in sequences]

    def step(self, news: dict[int, int], **options: Any) -> torch.Tensor:
        """Run the next ``news[request]`` tokens of each request, in this order."""
        starts, lengths, hidden = [0], [], []
        for request, count in news.items():
            begin, end = self.done[request], self.done[request] + count
            starts.append(starts[-1] + count)
            lengths.append(end)
            hidden.append(self.sequences[request][begin:end])
            self.done[request] = end
        self.metadata = metadata = self.builder.build(starts, lengths, self.table[list(news)])
        if self.index_cache is not None:
            options["index_cache"] = self.index_cache
        out = self.layer(torch.cat(hidden), self.cache, metadata, cache_format=self.cache_format, **options)
        for request, part in zip(news, out.split(list(news.values())), strict=True):
            self.outputs[request].append(part)
        return out

    def results(self) -> list[torch.Tensor]:
        return [torch.cat(parts) for parts in self.outputs]


def assert_like_stock(model: Stock, engine: Engine) -> None:
    """Check that every output so far is that of the stock module for the same request."""
    for request, result in enumerate(engine.results()):
        expected = model(engine.sequences[request].float())[: len(result)]
        assert_within(result.float(), expected)


def assert_within(result: torch.Tensor, expected: torch.Tensor, relative: float = RELATIVE) -> None:
    error = ((result - expected).abs().max() / expected.abs().max()).item()
    assert error <= relative, f"differs by {error:.2e} of the largest, {relative:g} is accepted"
