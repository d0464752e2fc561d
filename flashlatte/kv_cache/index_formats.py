"""Formats of index-key caches, one key per token, for the sparse-attention indexer.

``index_fp8``, 132 bytes for 128 values (the cache of DeepGEMM, vLLM and SGLang for DeepSeek-V3.2), a page of B tokens:

    bytes 0 to 128·B - 1        for each token 128 e4m3 values
    bytes 128·B to 132·B - 1    for each token a float32 scale

``index_mxfp4``, 68 bytes (DeepSeek-V4): first 64 bytes of e2m1 pairs per token, then four E8M0 bytes per token, one for
32 values. ``index_bf16`` and ``index_fp32`` store the values unquantized. Keys have no separate rope part: all values
are quantized alike. The cache tensor's row strides of 132 and 68 are nominal: a token's values and scales are not
contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from flashlatte.kv_cache import fp4
from flashlatte.kv_cache.formats import CacheFormat, Plane, PlaneRows, Scale
from flashlatte.kv_cache.fp8 import E4M3_MAX, as_bytes, divide, from_bytes, round_up_to_power_of_two, to_e4m3
from flashlatte.runtime import checks

HEAD_DIMS = (32, 64, 128)
SMALLEST_AMAX = 1e-4


@dataclass(frozen=True)
class IndexFormat(CacheFormat):
    """A cache of index keys of ``head_dim`` values.

    Attributes:
        encoding: encoding of a value: "e4m3", "bf16", "fp32" or "e2m1".
        value_bytes: bytes of a token's values.
        scale_bytes: bytes of a token's scales, which follow all values of its page.
    """

    encoding: ClassVar[str]

    head_dim: int = 128

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim of format {self.name} must be 32, 64 or 128, got {self.head_dim!r}")

    @property
    def rope_dim(self) -> int:
        return 0

    @property
    def value_bytes(self) -> int:
        return self.planes[0].width * self.record_dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        return self.bytes_per_token - self.value_bytes


@dataclass(frozen=True)
class IndexFp8Format(IndexFormat):
    """e4m3 values with a float32 scale per token: head_dim + 4 bytes."""

    name = "index_fp8"
    encoding = "e4m3"
    record_dtype = torch.uint8
    accepted_dtypes = (torch.uint8, torch.int8, torch.float8_e4m3fn)

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane(self.head_dim, torch.uint8), Plane(4, torch.uint8))

    def encode(self, latent: torch.Tensor, rope: torch.Tensor, scale: Scale, scale_rounding: str) -> PlaneRows:
        values, scales = quantize_rows(latent, scale_rounding)
        return as_bytes(values), as_bytes(scales.unsqueeze(-1))

    def decode(self, planes: PlaneRows, scale: Scale) -> torch.Tensor:
        values, scales = planes
        return from_bytes(values, torch.float8_e4m3fn).float() * from_bytes(scales, torch.float32)


@dataclass(frozen=True)
class IndexBf16Format(IndexFormat):
    """The values in bf16, without scales."""

    name = "index_bf16"
    encoding = "bf16"
    record_dtype = torch.bfloat16
    accepted_dtypes = (torch.bfloat16,)

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane(self.head_dim, self.record_dtype),)

    def encode(self, latent: torch.Tensor, rope: torch.Tensor, scale: Scale, scale_rounding: str) -> PlaneRows:
        return (latent.to(self.record_dtype),)

    def decode(self, planes: PlaneRows, scale: Scale) -> torch.Tensor:
        return planes[0].float()


@dataclass(frozen=True)
class IndexFp32Format(IndexBf16Format):
    """The values in float32, without scales: for float32 models and comparisons."""

    name = "index_fp32"
    encoding = "fp32"
    record_dtype = torch.float32
    accepted_dtypes = (torch.float32,)


@dataclass(frozen=True)
class IndexMxfp4Format(IndexFormat):
    """e2m1 values, two per byte, with an E8M0 scale per 32 values: head_dim / 2 + head_dim / 32 bytes."""

    name = "index_mxfp4"
    encoding = "e2m1"
    record_dtype = torch.uint8
    accepted_dtypes = (torch.uint8, torch.int8)

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane(self.head_dim // 2, torch.uint8), Plane(self.head_dim // fp4.TILE, torch.uint8))

    def encode(self, latent: torch.Tensor, rope: torch.Tensor, scale: Scale, scale_rounding: str) -> PlaneRows:
        return fp4.quantize_mxfp4(latent)

    def decode(self, planes: PlaneRows, scale: Scale) -> torch.Tensor:
        return fp4.dequantize_mxfp4(*planes)


INDEX_FORMATS: dict[str, type[IndexFormat]] = {
    cls.name: cls for cls in (IndexFp8Format, IndexBf16Format, IndexFp32Format, IndexMxfp4Format)
}

# The format of the cache that keys were gathered from, by the keys' dtype.
FORMAT_BY_KEY_DTYPE: dict[torch.dtype, str] = {
    torch.float8_e4m3fn: IndexFp8Format.name,
    torch.bfloat16: IndexBf16Format.name,
    torch.float32: IndexFp32Format.name,
    torch.uint8: IndexMxfp4Format.name,
}


def quantize_rows(
    x: torch.Tensor, scale_rounding: str, smallest_amax: float = SMALLEST_AMAX
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows [..., d] to e4m3 and float32 scales [...].

    The scale is max(amax, smallest_amax) / 448, not rounded ("exact") or rounded up to a power of two ("power_of_two").
    """
    x = x.float()
    scales = divide(x.abs().amax(dim=-1, keepdim=True).clamp_min(smallest_amax), E4M3_MAX)
    if scale_rounding == "power_of_two":
        scales = round_up_to_power_of_two(scales)
    return to_e4m3(x / scales), scales.squeeze(-1)


def index_format(name: str, head_dim: int = 128) -> IndexFormat:
    """The index-key format of this name.

    Raises:
        ValueError: an unknown name, or a head_dim other than 32, 64 and 128.
    """
    if name not in INDEX_FORMATS:
        raise ValueError(f"cache_format must be one of {', '.join(INDEX_FORMATS)}, got {name!r}")
    return INDEX_FORMATS[name](head_dim=head_dim)


def index_format_beside(latents: CacheFormat) -> str:
    """The name of the index-key format whose precision matches latents in this format."""
    if not latents.plain:
        return IndexFp8Format.name
    return IndexFp32Format.name if latents.record_dtype == torch.float32 else IndexBf16Format.name


def index_format_of(cache: torch.Tensor, head_dim: int, name: str = "cache") -> IndexFormat:
    """The index-key format of a cache, identified by its dtype and last dimension, for keys of ``head_dim`` values."""
    for cls in INDEX_FORMATS.values():
        layout = cls(head_dim=head_dim)
        if cache.dtype in layout.accepted_dtypes and cache.shape[-1] == layout.record_width:
            return layout
    widths = ", ".join(f"{cls(head_dim=head_dim).record_width} ({name})" for name, cls in INDEX_FORMATS.items())
    raise ValueError(
        f"{name} must hold index keys of {head_dim} values, {widths} wide; "
        f"got {str(cache.dtype).removeprefix('torch.')} {cache.shape[-1]} wide"
    )


def check_head_dim(name: str, head_dim: int) -> None:
    """Check the head dim of the argument ``name``."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"{name} must have a head dim of 32, 64 or 128, got {head_dim}")


def as_index_cache(
    cache: object, head_dim: int, name: str = "cache", device: torch.device | None = None
) -> tuple[torch.Tensor, IndexFormat]:
    """Check a cache [pages, page_size, 1, width] or [pages, page_size, width]; returns it 4-D with its format."""
    cache = checks.given(name, cache)
    if device is not None and cache.device != device:
        raise ValueError(f"{name} must be on {device} like the other arguments, got {cache.device}")
    if cache.dim() == 3:
        cache = cache.unsqueeze(2)
    if cache.dim() != 4 or cache.shape[2] != 1 or 0 in cache.shape:
        raise ValueError(
            f"{name} must have shape [pages, page_size, 1, width] with no empty axis, got {list(cache.shape)}"
        )
    layout = index_format_of(cache, head_dim, name)
    width = layout.record_width
    if cache.stride(3) != 1 or (cache.shape[1] > 1 and cache.stride(1) != width):
        raise ValueError(f"{name} must have contiguous pages, got strides {cache.stride()}")
    if cache.shape[0] > 1 and cache.stride(0) < width * cache.shape[1]:
        raise ValueError(
            f"{name} must have a page stride of at least {width * cache.shape[1]} elements, got {cache.stride(0)}"
        )
    return cache, layout
