"""``v32``: DeepSeek-V3.2's 656 bytes per token, interleaved; ``v32_no_rope``: its first 528, for models without RoPE.

bytes 0 to 511    512 e4m3 latent values
bytes 512 to 527  four float32 scales, one for 128 latent values
bytes 528 to 655  64 bf16 rope values
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte.kv_cache.formats import CacheFormat, Plane, Tiling
from flashlatte.kv_cache.fp8 import as_bytes, dequantize_tiles, from_bytes, quantize_tiles

TILE = 128
SCALES = 4
LATENT_BYTES = 512
SCALE_BYTES = 16
ROPE_BYTES = 128


@dataclass(frozen=True)
class V32Format(CacheFormat):
    """656 bytes per token. Readers accept any float32 scale and any page stride."""

    name = "v32"
    record_dtype = torch.uint8
    accepted_dtypes = (torch.uint8, torch.int8, torch.float8_e4m3fn)
    row_alignment = 4
    tiling = Tiling(
        tile=TILE,
        tiles=SCALES,
        padded_tiles=SCALES,
        row_bytes=LATENT_BYTES + SCALE_BYTES + ROPE_BYTES,
        rope_offset=LATENT_BYTES + SCALE_BYTES,
        e8m0=False,
    )

    def __post_init__(self) -> None:
        if self.head_dim != 576:
            raise ValueError(f"head_dim of format v32 is 576, got {self.head_dim}")

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane(LATENT_BYTES + SCALE_BYTES + ROPE_BYTES, torch.uint8),)

    def encode(
        self, latent: torch.Tensor, rope: torch.Tensor, scale: float | torch.Tensor, scale_rounding: str
    ) -> tuple[torch.Tensor, ...]:
        values, scales = quantize_tiles(latent, TILE, scale_rounding)
        parts = (as_bytes(values), as_bytes(scales), as_bytes(rope.to(torch.bfloat16)))
        return (torch.cat(parts, dim=-1),)

    def decode(self, planes: tuple[torch.Tensor, ...], scale: float | torch.Tensor) -> torch.Tensor:
        values, scales, rope = planes[0].split((LATENT_BYTES, SCALE_BYTES, ROPE_BYTES), dim=-1)
        latent = dequantize_tiles(from_bytes(values, torch.float8_e4m3fn), from_bytes(scales, torch.float32), TILE)
        return torch.cat((latent, from_bytes(rope, torch.bfloat16).float()), dim=-1)


@dataclass(frozen=True)
class V32NoRopeFormat(CacheFormat):
    """528 bytes a token: ``v32`` without the rope values. As wide as ``v41``, so that its name must be given."""

    name = "v32_no_rope"
    record_dtype = torch.uint8
    accepted_dtypes = (torch.uint8, torch.int8, torch.float8_e4m3fn)
    row_alignment = 4
    tiling = Tiling(
        tile=TILE,
        tiles=SCALES,
        padded_tiles=SCALES,
        row_bytes=LATENT_BYTES + SCALE_BYTES,
        rope_offset=LATENT_BYTES + SCALE_BYTES,
        e8m0=False,
    )

    head_dim: int = 512

    def __post_init__(self) -> None:
        if self.head_dim != 512:
            raise ValueError(f"head_dim of format v32_no_rope is 512, got {self.head_dim}")

    @property
    def rope_dim(self) -> int:
        return 0

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane(LATENT_BYTES + SCALE_BYTES, torch.uint8),)

    def encode(
        self, latent: torch.Tensor, rope: torch.Tensor, scale: float | torch.Tensor, scale_rounding: str
    ) -> tuple[torch.Tensor, ...]:
        values, scales = quantize_tiles(latent, TILE, scale_rounding)
        return (torch.cat((as_bytes(values), as_bytes(scales)), dim=-1),)

    def decode(self, planes: tuple[torch.Tensor, ...], scale: float | torch.Tensor) -> torch.Tensor:
        values, scales = planes[0].split((LATENT_BYTES, SCALE_BYTES), dim=-1)
        return dequantize_tiles(from_bytes(values, torch.float8_e4m3fn), from_bytes(scales, torch.float32), TILE)
