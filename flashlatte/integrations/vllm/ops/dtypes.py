"""Dtypes and cache formats for vLLM's ``kv_cache_dtype`` names."""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.kv_cache.plain import Fp8Format
from flashlatte.kv_cache.v32 import V32Format
from flashlatte.runtime import checks

# "auto" is the dtype of the cache.
_FLOATS = {
    "auto": checks.FLOAT_DTYPES,
    "bfloat16": (torch.bfloat16,),
    "float16": (torch.float16,),
    "half": (torch.float16,),
    "float": (torch.float32,),
    "float32": (torch.float32,),
}
# One-byte dtypes, whose scale is a separate argument.
ONE_BYTE = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
DS_MLA, DS_MLA_FORMAT = "fp8_ds_mla", V32Format.name
# With a scale for each token and head: the float32 scale after the values of each row.
_SCALE_BYTES = 4
# Accepted by the functions for caches of keys and values.
KV_CACHE_DTYPES = (*_FLOATS, *ONE_BYTE)
MLA_DTYPES = (*_FLOATS, "fp8", "fp8_e4m3", DS_MLA)


def latent_format(kv_cache_dtype: str, cache: torch.Tensor, name: str) -> str | None:
    """The name of a latent cache's format; None for plain rows in the cache's dtype."""
    checks.choice("kv_cache_dtype", kv_cache_dtype, MLA_DTYPES)
    if kv_cache_dtype in _FLOATS:
        _check_float(kv_cache_dtype, cache, name)
        return None
    return DS_MLA_FORMAT if kv_cache_dtype == DS_MLA else Fp8Format.name


def as_stored_dtype(kv_cache_dtype: str, cache: torch.Tensor, name: str) -> torch.Tensor:
    """View a cache of keys or values in the dtype of its values: vLLM stores fp8 as uint8."""
    checks.choice("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    if kv_cache_dtype in _FLOATS:
        _check_float(kv_cache_dtype, cache, name)
        return cache
    dtype = ONE_BYTE[kv_cache_dtype]
    if not isinstance(cache, torch.Tensor) or cache.dtype not in (torch.uint8, torch.int8, dtype):
        accepted = checks.dtype_names([torch.uint8, torch.int8, dtype])
        got = checks.dtype_names([cache.dtype]) if isinstance(cache, torch.Tensor) else type(cache).__name__
        raise TypeError(f"{name} must be {accepted} for kv_cache_dtype {kv_cache_dtype!r}, got {got}")
    return cache.view(dtype)


def cache_scale(kv_cache_dtype: str, scale: float | torch.Tensor) -> float | torch.Tensor | None:
    """``scale`` for a one-byte cache, else None: vLLM passes a scale with every cache."""
    return scale if kv_cache_dtype in ONE_BYTE else None


def as_e4m3(cache: torch.Tensor) -> torch.Tensor:
    """View uint8 as e4m3: vLLM stores fp8 as bytes."""
    is_bytes = isinstance(cache, torch.Tensor) and cache.dtype == torch.uint8
    return cache.view(torch.float8_e4m3fn) if is_bytes else cache


def one_byte_scale(cache: torch.Tensor, scale: float | torch.Tensor | None) -> float | torch.Tensor | None:
    """``scale`` if the dtype of ``cache`` has one byte, else None: vLLM passes a scale with every cache."""
    return scale if cache.dtype.itemsize == 1 else None


def quant_mode(kv_quant_mode: Any) -> str:
    """The name of one of vLLM's ``KVQuantMode``; "NONE" for None."""
    name = "NONE" if kv_quant_mode is None else getattr(kv_quant_mode, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"kv_quant_mode must be vLLM's KVQuantMode or None, got {kv_quant_mode!r}")
    return name


def without_scales(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The values of a cache whose rows are as wide as ``rows``, without the 4 bytes of scale that vLLM may append."""
    one_byte = checks.is_strided(cache) and cache.dim() == 4 and cache.dtype.itemsize == 1
    with_scale = (
        one_byte and checks.is_strided(rows) and rows.dim() > 0 and cache.shape[-1] == rows.shape[-1] + _SCALE_BYTES
    )
    return cache[..., :-_SCALE_BYTES] if with_scale else cache


def _check_float(kv_cache_dtype: str, cache: torch.Tensor, name: str) -> None:
    accepted = _FLOATS[kv_cache_dtype]
    if isinstance(cache, torch.Tensor) and cache.dtype not in accepted:
        raise TypeError(
            f"{name} must be {checks.dtype_names(accepted)} for kv_cache_dtype {kv_cache_dtype!r}, "
            f"got {checks.dtype_names([cache.dtype])}"
        )
