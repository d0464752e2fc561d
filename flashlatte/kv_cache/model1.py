"""``model1``: DeepSeek-V4's cache (vLLM's fp8_ds_mla for V4), 584 bytes per token in two planes.

    a page of B tokens:
    bytes 0 to 576·B - 1      for each token 448 e4m3 latent values, then 64 bf16 rope values
    bytes 576·B to 584·B - 1  for each token seven E8M0 scales, one for 64 latent values, and a zero
    then padding up to a multiple of 576 bytes

The cache tensor's row stride of 584 is nominal: a token's bytes are not contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte.kv_cache.formats import ByteFormat, Plane, PlaneRows, Scale, Tiling
from flashlatte.kv_cache.fp8 import as_bytes, dequantize_tiles, from_bytes, quantize_tiles

TILE = 64
LATENT_BYTES = 448
ROPE_BYTES = 128
SCALES = 7
SCALE_BYTES = 8


@dataclass(frozen=True)
class Model1Format(ByteFormat):
    """584 bytes per token, data and scales in separate planes. Rows and values are 512 wide: 448 latent, 64 rope."""

    name = "model1"
    page_alignment = LATENT_BYTES + ROPE_BYTES
    row_alignment = 4
    tiling = Tiling(
        tile=TILE,
        tiles=SCALES,
        padded_tiles=SCALE_BYTES,
        row_bytes=LATENT_BYTES + ROPE_BYTES,
        rope_offset=LATENT_BYTES,
        e8m0=True,
    )
    has_exact_scales = False

    head_dim: int = 512

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane(LATENT_BYTES + ROPE_BYTES, torch.uint8), Plane(SCALE_BYTES, torch.uint8))

    def encode(self, latent: torch.Tensor, rope: torch.Tensor, scale: Scale, scale_rounding: str) -> PlaneRows:
        values, scales = quantize_tiles(latent, TILE, "power_of_two")
        data = torch.cat((as_bytes(values), as_bytes(rope.to(torch.bfloat16))), dim=-1)
        exponents = as_bytes(scales.to(torch.float8_e8m0fnu))
        return data, torch.nn.functional.pad(exponents, (0, SCALE_BYTES - SCALES))

    def decode(self, planes: PlaneRows, scale: Scale) -> torch.Tensor:
        data, exponents = planes
        values, rope = data.split((LATENT_BYTES, ROPE_BYTES), dim=-1)
        scales = from_bytes(exponents[..., :SCALES], torch.float8_e8m0fnu).float()
        latent = dequantize_tiles(from_bytes(values, torch.float8_e4m3fn), scales, TILE)
        return torch.cat((latent, from_bytes(rope, torch.bfloat16).float()), dim=-1)
