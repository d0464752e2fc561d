"""Formats without tiles: rows in bf16, fp16 or fp32, or in e4m3 with one scale for the whole cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte.kv_cache.formats import ROPE_DIM, CacheFormat, Plane, PlaneRows, Scale
from flashlatte.kv_cache.fp8 import divide, to_e4m3


@dataclass(frozen=True)
class PlainFormat(CacheFormat):
    """Rows stored in ``record_dtype``, latent first, then rope."""

    plain = True

    def __post_init__(self) -> None:
        if isinstance(self.head_dim, bool) or not isinstance(self.head_dim, int) or self.head_dim < 1:
            raise ValueError(f"head_dim of format {self.name} must be an int of at least 1, got {self.head_dim!r}")

    @property
    def rope_dim(self) -> int:
        return ROPE_DIM if self.head_dim > ROPE_DIM else 0

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane(self.head_dim, self.record_dtype),)

    def encode(self, latent: torch.Tensor, rope: torch.Tensor, scale: Scale, scale_rounding: str) -> PlaneRows:
        return (torch.cat((latent, rope), dim=-1).to(self.record_dtype),)

    def decode(self, planes: PlaneRows, scale: Scale) -> torch.Tensor:
        # Copy in fp32 too: later writes to the cache must not change the result.
        return planes[0].to(torch.float32, copy=True)


@dataclass(frozen=True)
class Bf16Format(PlainFormat):
    name = "bf16"
    record_dtype = torch.bfloat16
    accepted_dtypes = (torch.bfloat16,)


@dataclass(frozen=True)
class Fp16Format(PlainFormat):
    name = "fp16"
    record_dtype = torch.float16
    accepted_dtypes = (torch.float16,)


@dataclass(frozen=True)
class Fp32Format(PlainFormat):
    name = "fp32"
    record_dtype = torch.float32
    accepted_dtypes = (torch.float32,)


@dataclass(frozen=True)
class Fp8Format(PlainFormat):
    """e4m3 rows, rope included, with one float32 scale: value = byte × scale (vLLM's dense ``fp8`` cache)."""

    name = "fp8"
    record_dtype = torch.float8_e4m3fn
    accepted_dtypes = (torch.float8_e4m3fn, torch.uint8, torch.int8)
    takes_scale = True

    def encode(self, latent: torch.Tensor, rope: torch.Tensor, scale: Scale, scale_rounding: str) -> PlaneRows:
        return (to_e4m3(divide(torch.cat((latent, rope), dim=-1).float(), scale)),)

    def decode(self, planes: PlaneRows, scale: Scale) -> torch.Tensor:
        return planes[0].float() * scale
