"""Conversion of DeepGEMM's queries, keys and weights to the operands of ``index_logits``."""

from __future__ import annotations

import torch

from flashlatte.kv_cache import fp4
from flashlatte.kv_cache.fp8 import dequantize_tiles, from_bytes
from flashlatte.ops.index_logits import api as index_logits_api
from flashlatte.runtime import checks

# Number of values that one int32 of four E8M0 scales covers.
_SCALED_VALUES = 4 * fp4.TILE

# Values, or (values, scales).
IndexQuery = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]


def query(q: IndexQuery) -> torch.Tensor:
    """float8_e4m3fn queries unchanged; mxfp8 and mxfp4 queries dequantized to bf16, which is exact."""
    if isinstance(q, torch.Tensor):
        return checks.given("q", q)
    check_pair("q", q)
    values, scales = q
    if scales is None:
        return values
    return _dequantized("q", values, _scale_bytes("q", scales))


def keys(k: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys and scales for ``index_logits``. mxfp8 keys are dequantized to bf16, which is exact."""
    if k.dtype.itemsize != 1 or (k.dtype == torch.float8_e4m3fn and not _is_int32(scales)):
        return k, scales
    scale_bytes = _scale_bytes("kv", scales)
    if k.dtype == torch.float8_e4m3fn:
        return _dequantized("kv", k, scale_bytes), None
    return k.view(torch.uint8), scale_bytes


def _dequantized(name: str, values: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
    """Dequantize float8_e4m3fn (mxfp8) or packed mxfp4 values with E8M0 bytes [..., 4] to bf16 [..., 128]."""
    is_mxfp8 = values.dtype == torch.float8_e4m3fn
    width = _SCALED_VALUES if is_mxfp8 else _SCALED_VALUES // 2
    if values.dtype.itemsize != 1 or values.shape != (*scale_bytes.shape[:-1], width):
        raise ValueError(
            f"{name} must be one-byte values [..., {_SCALED_VALUES // 2}] (mxfp4) or float8_e4m3fn "
            f"[..., {_SCALED_VALUES}] (mxfp8) with int32 scales [...], got {checks.dtype_names([values.dtype])} "
            f"{list(values.shape)} with {list(scale_bytes.shape[:-1])}"
        )
    if not is_mxfp8:
        return fp4.dequantize_mxfp4(values.view(torch.uint8), scale_bytes).to(torch.bfloat16)
    scales = from_bytes(scale_bytes, torch.float8_e8m0fnu).float()
    return dequantize_tiles(values, scales, fp4.TILE).to(torch.bfloat16)


def _is_int32(scales: object) -> bool:
    return isinstance(scales, torch.Tensor) and scales.dtype == torch.int32


def refuse_paged_mxfp8(q: IndexQuery) -> None:
    """Raise for mxfp8 queries: pages of mxfp8 and fp8 keys have the same width, so scales would be read as float32."""
    check_pair("q", q if not isinstance(q, torch.Tensor) else (q, None))
    if not isinstance(q, torch.Tensor) and q[0].dtype == torch.float8_e4m3fn and _is_int32(q[1]):
        raise ValueError(
            f"q must be fp8 without scales or mxfp4 over a paged cache, got values {list(q[0].shape)} with scales "
            "(mxfp8): caches of mxfp8 keys are not supported"
        )


def float32_weights(weights: torch.Tensor) -> torch.Tensor:
    """Weights in float32; the conversion from bf16 is exact."""
    is_bf16 = checks.is_strided(weights) and weights.dtype == torch.bfloat16
    return weights.float() if is_bf16 else weights


def logits_dtype_of(logits_dtype: object, weights: object, as_weights: bool) -> torch.dtype:
    """``logits_dtype`` if given; else the dtype of the weights if ``as_weights``, else float32."""
    if logits_dtype is None:
        is_bf16 = as_weights and isinstance(weights, torch.Tensor) and weights.dtype == torch.bfloat16
        return torch.bfloat16 if is_bf16 else torch.float32
    if not isinstance(logits_dtype, torch.dtype) or logits_dtype not in index_logits_api.LOGIT_DTYPES:
        raise TypeError(f"logits_dtype must be {checks.dtype_names(index_logits_api.LOGIT_DTYPES)}, got {logits_dtype}")
    return logits_dtype


def check_pair(name: str, value: object) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not isinstance(value[0], torch.Tensor):
        raise TypeError(f"{name} must be a tuple (values, scales), got {type(value).__name__}")
    for part, tensor in enumerate(value):
        if isinstance(tensor, torch.Tensor):
            checks.given(f"{name}[{part}]", tensor)


def _scale_bytes(name: str, scales: object) -> torch.Tensor:
    """View int32 scales [...] as uint8 [..., 4]."""
    if not isinstance(scales, torch.Tensor) or scales.dtype != torch.int32:
        got = checks.dtype_names([scales.dtype]) if isinstance(scales, torch.Tensor) else type(scales).__name__
        raise TypeError(f"{name} of mxfp4 and mxfp8 values must have int32 scales, four E8M0 bytes in each, got {got}")
    return scales.contiguous().unsqueeze(-1).view(torch.uint8)
