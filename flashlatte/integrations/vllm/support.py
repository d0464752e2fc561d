"""What FlashLatte serves inside vLLM, and in which words it refuses the rest. Nothing here imports vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashlatte.kv_cache.registry import plain_format
from flashlatte.kv_cache.v32 import V32Format
from flashlatte.ops import dense_decode as _dense_decode  # noqa: F401  (states the operation's implementations)
from flashlatte.ops import sparse_decode as _sparse_decode  # noqa: F401
from flashlatte.runtime import dispatch
from flashlatte.runtime.checks import dtype_names

# What vLLM's blocks are best read in: one copy of a block of keys. Hopper's kernels for dense decode read pages of any
# multiple of 8 tokens about as fast, those of the indexer of 32, those of sparse decode and the portable ones any.
PAGE_SIZE = 64
# Triton's.
MIN_CAPABILITY = (8, 0)

# vLLM's names of caches whose rows are numbers. "auto" is the model's dtype.
CACHE_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
# And those of caches that the attention of an indexer's choice reads; fp8_ds_mla is FlashLatte's v32.
SPARSE_CACHES = ("auto", "bfloat16", "float16", "fp8_ds_mla")

# DeepSeek-V4's architectures in vLLM, whose attention is layers of their own: they take no attention backend.
V4_MODELS = ("DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration")
V41_MODELS = ("DeepseekV41ForCausalLM",)
# Why FlashLatte does not serve a kind of model inside vLLM.
V41_UNSUPPORTED = (
    "DeepSeek-V4.1 is vLLM's own: its attention is layers of the model, which take no attention backend and would run "
    "as if none had been named"
)
V4_NEEDS_CUDA = "DeepSeek-V4 is served on CUDA only: elsewhere its attention is layers that take no attention backend"
# What of V4 is FlashLatte's.
V4_PARTS = "its attention and the indexer's choice; the compressor and what writes and gathers its caches stay vLLM's"
SUPPORTED_INDEXERS = "of models with an indexer, it serves DeepSeek-V3.2 and GLM-5"
# By ``model_type``: models of this library's layer to which vLLM gives no MLA backend.
WITHOUT_MLA = {
    "minicpm3": "vLLM runs MiniCPM3 as attention of many heads, whose keys and values it caches",
    "mistral4": "vLLM has no model of its own for transformers' Mistral 4",
    "youtu": "vLLM has no model of its own for Youtu",
}

# Their architectures in vLLM.
INDEXER_MODELS = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")

# vLLM's name of the caches of MLA without a sliding window, for which a configuration can name a backend of its own.
MLA_KIND = "mla_attention"


def page_sizes(block_size: int | None, multiple_of: Callable[[int], Any]) -> list[Any]:
    """The sizes of the pages that vLLM's blocks are read in: 64 where they can be split so, else any."""
    if block_size is not None and block_size % PAGE_SIZE == 0:
        return [PAGE_SIZE]
    return [multiple_of(1)]


def selected_backend(vllm_config: Any) -> str | None:
    """The attention backend that this configuration names for MLA, or None: one for the kind before one for all."""
    attention = vllm_config.attention_config
    of_kind = getattr(attention, "backend_per_kind", {}).get(MLA_KIND)  # vLLM 0.26 and later
    chosen = of_kind or attention.backend
    return None if chosen is None else chosen.name


def selects_flashlatte(vllm_config: Any) -> bool:
    """Whether this configuration names FlashLatte."""
    return selected_backend(vllm_config) == "CUSTOM"


def refuse(vllm_config: Any, reason: str | None) -> None:
    """Refuse a model where FlashLatte is named for it, if there is a reason.

    Raises:
        ValueError: there is one, and vLLM's attention backend is CUSTOM.
    """
    if reason is not None and selects_flashlatte(vllm_config):
        raise ValueError(f"attention backend CUSTOM is FlashLatte, and {reason}. Leave the option out")


def dense_refusal(
    device_type: str, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int | None
) -> str | None:
    """Why no kernel serves dense decode in these sizes, or None. The reference is for CPUs."""
    cache_dtype = CACHE_DTYPES.get(kv_cache_dtype or "auto", dtype)
    if cache_dtype != torch.float8_e4m3fn and (reason := _dtypes_refusal(dtype, kv_cache_dtype, cache_dtype)):
        return reason
    return _operation_refusal("dense_decode", device_type, head_size, dtype, cache_dtype, block_size)


def sparse_refusal(
    device_type: str, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int | None
) -> str | None:
    """Why no kernel serves the attention of an indexer's choice in these sizes, or None."""
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
    """Why no kernel serves the operation over a cache of these numbers, or in this format."""
    try:
        call = dispatch.Call(
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


def check_layer(
    kv_cache_dtype: str, qk_rope_head_dim: int, caches: Sequence[str] = ("auto", *CACHE_DTYPES), **unserved: Any
) -> None:
    """Refuse a layer, as vLLM's own backends do, for what FlashLatte does not serve.

    Args:
        caches: the names of the dtypes of caches that are served.

    Raises:
        NotImplementedError: a cache of another dtype, keys without a rotated part, or one of ``unserved`` is given.
    """
    if kv_cache_dtype not in caches:
        known = ", ".join(caches)
        raise NotImplementedError(f"FlashLatte serves MLA with kv_cache_dtype {known}, and it is {kv_cache_dtype}")
    if not qk_rope_head_dim:
        raise NotImplementedError("FlashLatte serves MLA whose keys have a rotated part, and qk_rope_head_dim is 0")
    for name, value in unserved.items():
        if value:
            raise NotImplementedError(f"FlashLatte serves MLA without {name}, and it is {value!r}")


def check_indexer(*, compress_ratio: int = 1, **unserved: Any) -> None:
    """Refuse V3.2's indexer for what FlashLatte's does not do: DeepSeek-V4's compression, fp4 keys, candidate blocks.

    Raises:
        NotImplementedError: ``compress_ratio`` is not 1, or one of ``unserved`` is given.
    """
    if compress_ratio != 1:
        raise NotImplementedError(f"FlashLatte serves indexers without compress_ratio, and it is {compress_ratio}")
    for name, value in unserved.items():
        if isinstance(value, torch.Tensor) or value:
            raise NotImplementedError(f"FlashLatte serves indexers without {name}, and it is {value!r}")
