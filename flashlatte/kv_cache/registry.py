"""The formats by name, and the format that a tensor's dtype and width tell."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.model1 import Model1Format
from flashlatte.kv_cache.plain import Bf16Format, Fp8Format, Fp16Format, Fp32Format
from flashlatte.kv_cache.v32 import V32Format

FORMATS: dict[str, type[CacheFormat]] = {
    cls.name: cls for cls in (Bf16Format, Fp16Format, Fp32Format, Fp8Format, V32Format, Model1Format)
}
FORMAT_NAMES = tuple(FORMATS)
UNTILED_BY_DTYPE = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8",
}
TILED = (V32Format(), Model1Format())


def as_format(cache_format: str | CacheFormat, head_dim: int | None = None) -> CacheFormat:
    """The format of this name. ``head_dim`` is free for bf16, fp16, fp32 and fp8, and fixed for the others."""
    if isinstance(cache_format, CacheFormat):
        if head_dim is not None and head_dim != cache_format.head_dim:
            raise ValueError(
                f"head_dim must be {cache_format.head_dim} as in the given {cache_format.name} format, got {head_dim}"
            )
        return cache_format
    if cache_format not in FORMATS:
        raise ValueError(f"cache_format must be one of {', '.join(FORMATS)}, got {cache_format!r}")
    cls = FORMATS[cache_format]
    return cls() if head_dim is None else cls(head_dim=head_dim)


def infer_format(cache: torch.Tensor, name: str = "cache") -> CacheFormat:
    """The format that a cache tensor's dtype and last dimension tell.

    16- and 32-bit floats are the untiled formats with that row width; one-byte caches are ``v32`` (656 wide),
    ``model1`` (584) or, as float8_e4m3fn of any other width, ``fp8``.
    """
    width = cache.shape[-1]
    for layout in TILED:
        if width == layout.record_width and cache.dtype in layout.accepted_dtypes:
            return layout
    if cache.dtype in UNTILED_BY_DTYPE:
        return FORMATS[UNTILED_BY_DTYPE[cache.dtype]](head_dim=width)
    raise ValueError(
        f"{name} must be a bfloat16, float16 or float32 cache, a float8_e4m3fn cache (fp8), or a one-byte cache "
        f"656 (v32) or 584 (model1) wide; got {str(cache.dtype).removeprefix('torch.')} {width} wide"
    )
