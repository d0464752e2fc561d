"""``v32``: DeepSeek-V3.2's 656 bytes per token, interleaved; ``v32_no_rope``: its first 528, for models without RoPE.

bytes 0 to 511    512 e4m3 latent values
bytes 512 to 527  four float32 scales, one for 128 latent values
bytes 528 to 655  64 bf16 rope values
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte.kv_cache.formats import ROPE_DIM, ByteFormat, Plane, PlaneRows, Scale, Tiling
from flashlatte.kv_cache.fp8 import as_bytes, dequantize_tiles, from_bytes, quantize_tiles

TILE = 128
SCALES = 4
LATENT_BYTES = 512
SCALE_BYTES = 16
TILING = Tiling(
    tile=TILE,
    tiles=SCALES,
    padded_tiles=SCALES,
    row_bytes=LATENT_BYTES + SCALE_BYTES + 2 * ROPE_DIM,
    rope_offset=LATENT_BYTES + SCALE_BYTES,
    e8m0=False,
)


@dataclass(frozen=True)
class V32Format(ByteFormat):
    """656 bytes per token. Readers accept any float32 scale and any page stride."""

    name = "v32"
    row_alignment = 4
    tiling = TILING

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane(LATENT_BYTES + SCALE_BYTES + 2 * self.rope_dim, torch.uint8),)

    def encode(self, latent: torch.Tensor, rope: torch.Tensor, scale: Scale, scale_rounding: str) -> PlaneRows:
        values, scales = quantize_tiles(latent, TILE, scale_rounding)
        parts = (as_bytes(values), as_bytes(scales), as_bytes(rope.to(torch.bfloat16)))
        return (torch.cat(parts, dim=-1),)

    def decode(self, planes: PlaneRows, scale: Scale) -> torch.Tensor:
        values, scales, rope = planes[0].split((LATENT_BYTES, SCALE_BYTES, 2 * self.rope_dim), dim=-1)
        latent = dequantize_tiles(from_bytes(values, torch.float8_e4m3fn), from_bytes(scales, torch.float32), TILE)
        return torch.cat((latent, from_bytes(rope, torch.bfloat16).float()), dim=-1)


@dataclass(frozen=True)
class V32NoRopeFormat(V32Format):
    """528 bytes a token: ``v32`` without the rope values. As wide as ``v41``, so that its name must be given."""

    name = "v32_no_rope"
    tiling = TILING._replace(row_bytes=LATENT_BYTES + SCALE_BYTES)

    head_dim: int = 512

    @property
    def rope_dim(self) -> int:
        return 0
