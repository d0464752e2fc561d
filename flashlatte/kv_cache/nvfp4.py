"""``nvfp4_ds_mla``: vLLM's cache of 352 bytes per token for the rows of DeepSeek-V3.

bytes 0 to 255    512 latent values, e2m1, two per byte, the even one in the low half
bytes 256 to 319  64 rope values, e4m3 without a scale, saturating at 448
bytes 320 to 351  thirty-two e4m3 scales, one for 16 latent values; that of block s is byte 8 · (s % 4) + s // 4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte.kv_cache.formats import BlockScaling, ByteFormat, Plane, PlaneRows, Scale
from flashlatte.kv_cache.fp4 import NVFP4_BLOCK, dequantize_nvfp4, quantize_nvfp4
from flashlatte.kv_cache.fp8 import as_bytes, from_bytes, to_e4m3

LATENT = 512
ROPE_BYTES = 64
SCALES = LATENT // NVFP4_BLOCK
LANES = 4


@dataclass(frozen=True)
class Nvfp4Format(ByteFormat):
    """352 bytes per token. The scale is amax / 6 rounded up to e4m3.

    The error of a value is at most 3/16 of amax in a block with amax from 6 · 2^-6 to 2,688: half of e2m1's largest
    step (2 of 6), with a scale up to 1/8 too large. It is at most 2^-6 in a block with a smaller amax. Values above
    2,688 saturate. The relative error of a rope value is at most 2^-4, or the absolute error 2^-10, up to 448.
    """

    name = "nvfp4_ds_mla"
    accepted_dtypes = (torch.uint8, torch.int8)
    has_exact_scales = False
    block_scaling = BlockScaling(
        fp4=True,
        block=NVFP4_BLOCK,
        blocks=SCALES,
        scale_offset=LATENT // 2 + ROPE_BYTES,
        token_bytes=LATENT // 2 + ROPE_BYTES + SCALES,
        scale_lanes=LANES,
        rounds_up=True,
    )

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane(LATENT // 2 + ROPE_BYTES + SCALES, torch.uint8),)

    def encode(self, latent: torch.Tensor, rope: torch.Tensor, scale: Scale, scale_rounding: str) -> PlaneRows:
        values, scales = quantize_nvfp4(latent, rounds_up=True)
        in_lanes = scales.unflatten(-1, (SCALES // LANES, LANES)).transpose(-1, -2).flatten(-2)
        return (torch.cat((values, as_bytes(to_e4m3(rope.float())), in_lanes), dim=-1),)

    def decode(self, planes: PlaneRows, scale: Scale) -> torch.Tensor:
        values, rope, in_lanes = planes[0].split((LATENT // 2, ROPE_BYTES, SCALES), dim=-1)
        scales = in_lanes.unflatten(-1, (LANES, SCALES // LANES)).transpose(-1, -2).flatten(-2)
        latent = dequantize_nvfp4(values, scales)
        return torch.cat((latent, from_bytes(rope, torch.float8_e4m3fn).float()), dim=-1)
