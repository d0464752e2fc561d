"""Example calls of every operation, in the shapes of a model, for which ``dispatch`` selects implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashlatte.kv_cache import FORMAT_NAMES, get_format
from flashlatte.kv_cache.v41 import V41Format, V41Fp4Format
from flashlatte.layers import MLAConfig, V4Config, V41Config
from flashlatte.runtime import dispatch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEEPSEEK_V3 = MLAConfig(hidden_size=7168, num_attention_heads=128, q_lora_rank=1536)
# Latent and rotated dims of DeepSeek-V4's rows.
V4_ROW = (448, 64)
# Operations of models' layers that take attention sinks. All implementations support sinks.
_SINK_OPERATIONS = ("sparse_decode", "sparse_prefill", "sparse_attention_backward")


def typical_calls(device: torch.device, dtype: torch.dtype, model: MLAConfig | None = None) -> list[dispatch.CallSpec]:
    """One call of every operation and cache format, in the shape of ``model``.

    Without a model, they have DeepSeek-V3's shape, or V4's for V4's formats.
    """
    config = model or DEEPSEEK_V3
    plain = next(name for name, value in DTYPES.items() if value == dtype)
    heads: dict[str, Any] = {"h_q": config.num_attention_heads, "h_kv": 1}
    widths = dict.fromkeys((plain, "fp8", *_formats_of(config.kv_lora_rank, config.qk_rope_head_dim)), config.head_dim)
    if model is None:
        widths |= dict.fromkeys(_formats_of(*V4_ROW), sum(V4_ROW))

    def over(operation: str, cache_format: str) -> dispatch.CallSpec:
        width = widths[cache_format]
        layout = get_format(cache_format)
        value = config.kv_lora_rank if layout.plain else layout.value_dim
        return dispatch.CallSpec(operation, device, dtype, cache_format, 64, width, value, **heads)

    calls = [over("dense_decode", name) for name in widths if get_format(name).plain]
    calls += [over("sparse_decode", name) for name in widths if not get_format(name).takes_scale]
    shared = {"head_dim": config.head_dim, "head_dim_v": config.kv_lora_rank}
    calls += [
        dispatch.CallSpec(name, device, dtype, **shared, **heads)
        for name in ("sparse_prefill", "sparse_attention_backward")
    ]
    index_dim = None if config.indexer is None else config.indexer.head_dim
    loss_sizes: dict[str, Any] = {"head_dim": config.head_dim, "index_dim": index_dim, **heads}
    calls.append(dispatch.CallSpec("indexer_loss", device, dtype, **loss_sizes))
    per_head: dict[str, Any] = {
        "head_dim": config.qk_head_dim,
        "head_dim_v": config.v_head_dim,
        "h_q": config.num_attention_heads,
        "h_kv": config.num_attention_heads,
    }
    calls += [
        dispatch.CallSpec(name, device, dtype, **per_head) for name in ("dense_prefill", "dense_prefill_backward")
    ]
    calls.append(dispatch.CallSpec("merge_states", device, dtype, head_dim_v=config.v_head_dim))
    widest = max(config.kv_lora_rank, config.q_lora_rank or 0)
    calls.append(dispatch.CallSpec("latent_rows", device, dtype, head_dim=widest))
    calls.append(dispatch.CallSpec("rotate_heads", device, dtype, head_dim=config.qk_rope_head_dim))
    for operation in ("cache_write", "cache_gather"):
        for name, width in widths.items():
            calls.append(dispatch.CallSpec(operation, device, dtype, name, page_size=64, head_dim=width))
    calls.append(dispatch.CallSpec("paged_attention", device, dtype, page_size=16, head_dim=128, head_dim_v=128))
    for operation in ("turboquant_store", "turboquant_decode", "turboquant_gather"):
        calls.append(dispatch.CallSpec(operation, device, dtype, page_size=16, head_dim=128, head_dim_v=128))
    for operation in ("index_logits", "paged_index_logits"):
        if config.indexer is None:
            calls.append(dispatch.CallSpec(operation, device, torch.float8_e4m3fn, page_size=64, head_dim=128))
        else:
            sizes: dict[str, Any] = {"head_dim": config.indexer.head_dim, "h_q": config.indexer.num_heads}
            for name, query in (("index_fp8", torch.float8_e4m3fn), ("index_bf16", torch.bfloat16)):
                calls.append(dispatch.CallSpec(operation, device, query, name, 64, **sizes))
    covered = {call.operation for call in calls}
    calls += [dispatch.CallSpec(name, device, dtype) for name in dispatch.operations() if name not in covered]
    return calls


def v4_calls(device: torch.device, dtype: torch.dtype, layers: Sequence[V4Config]) -> list[dispatch.CallSpec]:
    """One call of every operation of DeepSeek-V4's layers and every cache format."""
    config, indexer = layers[0], next((layer.indexer for layer in layers if layer.indexer is not None), None)
    width, heads = config.head_dim, config.num_attention_heads
    plain = next(name for name, value in DTYPES.items() if value == dtype)
    formats = [plain, *_formats_of(width - config.rope_dim, config.rope_dim)]
    attention: dict[str, Any] = {"head_dim": width, "head_dim_v": width, "h_q": heads, "h_kv": 1}

    def over(operation: str, names: Sequence[str], **sizes: Any) -> list[dispatch.CallSpec]:
        return [dispatch.CallSpec(operation, device, dtype, name, 64, **sizes) for name in names]

    calls = [dispatch.CallSpec("q_kv_norm", device, dtype, head_dim=max(width, config.q_lora_rank))]
    calls += over("rotate_and_cache", formats, head_dim=width, h_q=heads)
    calls += over("compress", formats, head_dim=width)
    if indexer is not None:
        index: dict[str, Any] = {"head_dim": indexer.head_dim, "h_q": indexer.num_heads}
        calls += over("compress", ("index_fp8", "index_bf16"), head_dim=indexer.head_dim)
        calls.append(dispatch.CallSpec("index_query", device, dtype, **index))
        for name, query in (("index_fp8", torch.float8_e4m3fn), ("index_bf16", torch.bfloat16)):
            calls.append(dispatch.CallSpec("paged_index_logits", device, query, name, 64, **index))
        calls.append(dispatch.CallSpec("topk", device, torch.float32))
    calls.append(dispatch.CallSpec("index_convert", device, torch.int32))
    calls += over("sparse_decode", formats, **attention)
    calls += over("cache_gather", formats, head_dim=width)
    calls.append(dispatch.CallSpec("index_workspace", device, torch.int32))
    calls.append(dispatch.CallSpec("sparse_prefill", device, dtype, **attention))
    calls.append(dispatch.CallSpec("rotate_heads", device, dtype, head_dim=config.rope_dim, h_q=heads))
    return calls


def v41_calls(device: torch.device, dtype: torch.dtype, layers: Sequence[V41Config]) -> list[dispatch.CallSpec]:
    """One call of every operation of DeepSeek-V4.1's layers and every cache format."""
    calls, config = v4_calls(device, dtype, layers), layers[0]
    width = config.head_dim
    attention: dict[str, Any] = {"head_dim": width, "head_dim_v": width, "h_q": config.num_attention_heads, "h_kv": 1}
    formats = [call.cache_format for call in calls if call.operation == "cache_gather"]
    if V41Format.name in formats:
        attention["extra_cache_format"] = V41Fp4Format.name
        calls.append(dispatch.CallSpec("sparse_decode", device, dtype, V41Format.name, 64, **attention))
    calls += [dispatch.CallSpec("cache_write", device, dtype, name, 64, head_dim=width) for name in formats]
    indexer = next((layer.indexer for layer in layers if layer.candidates is not None), None)
    if indexer is not None:
        index: dict[str, Any] = {"head_dim": indexer.head_dim, "h_q": indexer.num_heads}
        for name, query in (("index_fp8", torch.float8_e4m3fn), ("index_bf16", torch.bfloat16)):
            calls.append(dispatch.CallSpec("sparse_index_logits", device, query, name, 64, **index))
    return calls


def takes_sink(operation: str) -> bool:
    """Whether a layer with attention sinks passes them to the operation."""
    return operation in _SINK_OPERATIONS


def _formats_of(latent_dim: int, rope_dim: int) -> list[str]:
    """The quantized formats for rows of these sizes."""
    layouts = [layout for layout in map(get_format, FORMAT_NAMES) if not layout.plain]
    return [layout.name for layout in layouts if (layout.latent_dim, layout.rope_dim) == (latent_dim, rope_dim)]
