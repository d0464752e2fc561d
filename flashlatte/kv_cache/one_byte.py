"""One-byte dtypes of quantized key and value caches: e4m3, e5m2 and int8."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.fp8 import divide

# The largest value of each dtype; larger values saturate.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
SMALLEST_SCALE = 1e-6


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 x / scale cast to ``dtype``: to nearest even, saturating. NaN stays NaN; in int8 it becomes 0."""
    scaled = (x / scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    return scaled.round().nan_to_num().to(dtype) if dtype == torch.int8 else scaled.to(dtype)


def row_scales(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales [..., 1] for rows [..., d]: amax / the dtype's largest value, at least 1e-6; NaN for a row with a NaN."""
    return divide(x.abs().amax(dim=-1, keepdim=True), LARGEST[dtype]).clamp_min(SMALLEST_SCALE)
