"""Which configurations of vLLM FlashLatte supports, and error messages for the others. Does not import vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashlatte.integrations import decode_precision
from flashlatte.kv_cache.registry import plain_format
from flashlatte.kv_cache.v32 import V32Format
from flashlatte.ops import dense_decode as _dense_decode  # noqa: F401  (registers the operation's implementations)
from flashlatte.ops import sparse_decode as _sparse_decode  # noqa: F401
from flashlatte.runtime import checks, dispatch
from flashlatte.runtime.checks import dtype_names

# The preferred page size: one copy for each tile of keys. Hopper's dense-decode kernels read pages of any multiple of 8
# tokens about as fast, its indexer kernels multiples of 32, its sparse-decode kernel and the portable kernels any size.
PAGE_SIZE = 64
# Triton's minimum.
MIN_CAPABILITY = (8, 0)

# vLLM's names of caches whose rows are plain values. "auto" is the model's dtype.
CACHE_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
# Caches of models with an indexer; fp8_ds_mla is FlashLatte's v32 format.
SPARSE_CACHES = ("auto", "bfloat16", "float16", "fp8_ds_mla")

# DeepSeek-V4's architectures in vLLM. Their attention layers take no attention backend.
V4_MODELS = ("DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration")
V41_MODELS = ("DeepseekV41ForCausalLM",)
DOTS3_MODELS = ("Dots3NoteForCausalLM",)
KIMI_MODELS = ("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration")
# Why FlashLatte does not support a kind of model inside vLLM.
V41_UNSUPPORTED = (
    "DeepSeek-V4.1 runs with vLLM's own attention layers, which take no attention backend and would ignore the option"
)
# The compression ratio of V4's layers with an indexer.
V4_INDEXER_RATIO = 4
V4_NEEDS_CUDA = "DeepSeek-V4 is supported on CUDA only: elsewhere its attention layers take no attention backend"
V4_NEEDS_E4M3 = (
    "DeepSeek-V4 is supported from compute capability 8.9 on: its compressor and its cache writes are vLLM's Triton "
    "kernels, which convert to e4m3"
)
# The parts of V4 that FlashLatte replaces.
V4_PARTS = "its attention and the indexer's selection; vLLM compresses keys and writes and gathers the caches"
DOTS3_UNSUPPORTED = (
    "dots3's layers use vLLM's own attention classes and would ignore the option; its sliding-window layers have rows "
    "of 1,088 elements, and FlashLatte's kernels read at most 1,024"
)
KIMI_FP8_UNSUPPORTED = (
    "Kimi's layers quantize the queries of a prefill over an fp8 cache, and FlashLatte's prefill takes 16 bits"
)
NEEDS_CUSTOM = "models with an indexer need --attention-backend CUSTOM"
# What FLASHLATTE_DECODE_PRECISION needs.
PRECISION_NEEDS = "a model whose layers all attend to all tokens, without an indexer"
PRECISION_NEEDS_NO_SINKS = "layers without attention sinks, which are applied by lse"
SHARED_SPECULATION_UNSUPPORTED = (
    "FlashLatte supports decode context parallelism with speculative decoding only with --no-async-scheduling: "
    "requests with drafts run in vLLM's prefill, which takes lengths from the host, and these count rejected drafts too"
)
WINDOW_UNSUPPORTED = "its backends for MLA take no sliding windows"
# By ``model_type``: models that FlashLatte's layer supports, but for which vLLM uses no MLA backend.
WITHOUT_MLA = {
    "minicpm3": "vLLM runs MiniCPM3 as attention of many heads, whose keys and values it caches",
    "mistral4": "vLLM has no implementation of transformers' Mistral 4",
    "youtu": "vLLM has no implementation of Youtu",
}

# Architectures of models whose indexer FlashLatte replaces. In others it attends to the selection of vLLM's indexer.
INDEXER_MODELS = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "HYV4ForCausalLM")
# With vLLM's own indexer.
GLM_NEXT_MODELS = ("Glm5NextForCausalLM", "Glm5NextForConditionalGeneration")
# On a CPU, vLLM runs the others with the layers of ``model_executor.models.deepseek_v2``.
CPU_INDEXER_MODELS = ("HYV4ForCausalLM",)

# vLLM's name for MLA caches without a sliding window, the key of ``backend_per_kind``.
MLA_KIND = "mla_attention"


def page_sizes(block_size: int | None, multiple_of: Callable[[int], Any]) -> list[Any]:
    """Supported page sizes of kernels within vLLM's blocks: 64 if it divides ``block_size``, else any."""
    if block_size is not None and block_size % PAGE_SIZE == 0:
        return [PAGE_SIZE]
    return [multiple_of(1)]


def selected_backend(vllm_config: Any) -> str | None:
    """The attention backend that this configuration names for MLA, or None. ``backend_per_kind`` takes precedence."""
    attention = vllm_config.attention_config
    of_kind = getattr(attention, "backend_per_kind", {}).get(MLA_KIND)  # vLLM 0.26 and later
    chosen = of_kind or attention.backend
    return None if chosen is None else chosen.name


def selects_flashlatte(vllm_config: Any) -> bool:
    """Whether this configuration selects FlashLatte."""
    return selected_backend(vllm_config) == "CUSTOM"


def refuse(vllm_config: Any, reason: str | None) -> None:
    """Raise if ``reason`` is given and the configuration selects FlashLatte.

    Raises:
        ValueError: ``reason`` is not None, and the attention backend is CUSTOM.
    """
    if reason is not None and selects_flashlatte(vllm_config):
        raise ValueError(f"attention backend CUSTOM is FlashLatte: {reason}. Remove the option")


def dense_refusal(
    device_type: str, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int | None
) -> str | None:
    """Why no implementation supports dense decode with these sizes, or None. CPUs use the reference."""
    cache_dtype = CACHE_DTYPES.get(kv_cache_dtype or "auto", dtype)
    if reason := decode_precision.refusal(device_type, head_size, dtype, cache_dtype, block_size or PAGE_SIZE):
        return reason
    if cache_dtype != torch.float8_e4m3fn and (reason := _dtypes_refusal(dtype, kv_cache_dtype, cache_dtype)):
        return reason
    return _operation_refusal("dense_decode", device_type, head_size, dtype, cache_dtype, block_size)


def sparse_refusal(
    device_type: str, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int | None
) -> str | None:
    """Why no implementation supports sparse decode with these sizes, or None. CPUs use the reference."""
    if decode_precision.requested() is not None:
        return decode_precision.needs_message(PRECISION_NEEDS)
    if kv_cache_dtype == "fp8_ds_mla":
        return _operation_refusal("sparse_decode", device_type, head_size, dtype, V32Format.name, block_size)
    cache_dtype = CACHE_DTYPES.get(kv_cache_dtype or "auto", dtype)
    if reason := _dtypes_refusal(dtype, kv_cache_dtype, cache_dtype):
        return reason
    return _operation_refusal("sparse_decode", device_type, head_size, dtype, cache_dtype, block_size)


def _dtypes_refusal(dtype: torch.dtype, kv_cache_dtype: str | None, cache_dtype: torch.dtype) -> str | None:
    if cache_dtype == dtype:
        return None
    return f"FlashLatte: a {kv_cache_dtype} cache takes queries of its own dtype, not {dtype_names([dtype])}"


def _operation_refusal(
    operation: str,
    device_type: str,
    head_size: int,
    dtype: torch.dtype,
    cache: torch.dtype | str,
    block_size: int | None,
) -> str | None:
    """Why no implementation supports the operation over a cache of this dtype or format, or None."""
    try:
        call = dispatch.CallSpec(
            operation,
            torch.device(device_type),
            dtype,
            cache_format=cache if isinstance(cache, str) else plain_format(cache).name,
            page_size=block_size or PAGE_SIZE,
            head_dim=head_size,
            h_kv=1,
        )
        dispatch.select(call, "reference" if device_type == "cpu" else "portable")
    except ValueError as error:
        return f"FlashLatte: {error}"
    return None


def check_layer(kv_cache_dtype: str, caches: Sequence[str] = ("auto", *CACHE_DTYPES), **unsupported: Any) -> None:
    """Check that FlashLatte supports a layer. The exception type is that of vLLM's own backends.

    Args:
        caches: supported values of ``kv_cache_dtype``.
        unsupported: options that FlashLatte does not support, by name; a true value raises.

    Raises:
        NotImplementedError: another ``kv_cache_dtype``, or an option in ``unsupported``.
    """
    if kv_cache_dtype not in caches:
        known = ", ".join(caches)
        raise NotImplementedError(f"FlashLatte supports MLA with kv_cache_dtype {known}, got {kv_cache_dtype}")
    for name, value in unsupported.items():
        if value:
            raise NotImplementedError(f"FlashLatte supports MLA without {name}, got {value!r}")


def v4_shared_layers(config: Any) -> set[int]:
    """DeepSeek-V4's layers that reuse the selection of the layer with an indexer before them (IndexCache).

    ``index_topk_pattern`` has a letter for each layer of the model, "S" for those that reuse. With
    ``index_topk_freq``, the first one of the layers with an indexer and every freq-th after it select
    (arXiv:2603.12201).

    Args:
        config: the text model's configuration, vLLM's (until 0.32) or transformers' (0.33).

    Raises:
        ValueError: ``index_topk_freq`` below 1, or the first layer with an indexer would reuse a selection.
    """
    ratios = _v4_compress_ratios(config)[: config.num_hidden_layers]
    selecting = [layer for layer, ratio in enumerate(ratios) if ratio == V4_INDEXER_RATIO]
    pattern, frequency = getattr(config, "index_topk_pattern", None), getattr(config, "index_topk_freq", None)
    if pattern is None:
        frequency = checks.positive_int("index_topk_freq", 1 if frequency is None else frequency)
        return {layer for order, layer in enumerate(selecting) if order % frequency}
    shared = {layer for layer in selecting if pattern[layer : layer + 1] == "S"}
    if selecting and selecting[0] in shared:
        raise ValueError(
            f"index_topk_pattern must not be S for layer {selecting[0]}, the first one with an indexer, got {pattern!r}"
        )
    return shared


def _v4_compress_ratios(config: Any) -> list[int]:
    """The compression ratio of each of DeepSeek-V4's layers, 0 with a window only.

    vLLM's own configuration keeps the checkpoint's ``compress_ratios``. transformers' has ``layer_types`` instead.
    """
    ratios = getattr(config, "compress_ratios", None)
    if ratios is None:
        return [config.compress_rates.get(kind, 0) for kind in config.layer_types]
    return list(ratios)


def check_indexer(*, compress_ratio: int = 1, **unsupported: Any) -> None:
    """Check that FlashLatte supports an indexer: no compression (DeepSeek-V4), fp4 keys or candidate blocks.

    Raises:
        NotImplementedError: ``compress_ratio`` is not 1, or an option in ``unsupported`` is set.
    """
    if compress_ratio != 1:
        raise NotImplementedError(f"FlashLatte supports indexers without compress_ratio, got {compress_ratio}")
    for name, value in unsupported.items():
        if isinstance(value, torch.Tensor) or value:
            raise NotImplementedError(f"FlashLatte supports indexers without {name}, got {value!r}")
