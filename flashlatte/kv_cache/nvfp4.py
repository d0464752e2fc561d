"""``nvfp4_ds_mla``: vLLM's 352 bytes a token for the rows of DeepSeek-V3.

bytes 0 to 255    512 latent values, e2m1, two a byte, the even one in the low half
bytes 256 to 319  64 rope values, e4m3 without a scale, saturating at 448
bytes 320 to 351  thirty-two e4m3 scales, one for 16 latent values; that of block s is byte 8 · (s % 4) + s // 4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte.kv_cache.formats import BlockScaling, CacheFormat, Plane
from flashlatte.kv_cache.fp4 import NVFP4_BLOCK, dequantize_nvfp4, quantize_nvfp4
from flashlatte.kv_cache.fp8 import as_bytes, from_bytes, to_e4m3

LATENT = 512
ROPE_BYTES = 64
SCALES = LATENT // NVFP4_BLOCK
LANES = 4


@dataclass(frozen=True)
class Nvfp4Format(CacheFormat):
    """352 bytes a token. Scales are e4m3's next number that is no less than amax / 6.

    In a block whose largest value amax is from 6 · 2^-6 to 2,688, values are within 3/16 of amax: half of e2m1's
    longest step, which is 1 of 6, of a scale that is an eighth too large at most. In a block of smaller values they are
    within 2^-6. Values beyond 2,688 saturate. Rope values are within 2^-4 of themselves, or 2^-10, up to 448.
    """

    name = "nvfp4_ds_mla"
    record_dtype = torch.uint8
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

    def __post_init__(self) -> None:
        if self.head_dim != 576:
            raise ValueError(f"head_dim of format {self.name} is 576, got {self.head_dim}")

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane(LATENT // 2 + ROPE_BYTES + SCALES, torch.uint8),)

    def encode(
        self, latent: torch.Tensor, rope: torch.Tensor, scale: float | torch.Tensor, scale_rounding: str
    ) -> tuple[torch.Tensor, ...]:
        values, scales = quantize_nvfp4(latent, rounds_up=True)
        in_lanes = scales.unflatten(-1, (SCALES // LANES, LANES)).transpose(-1, -2).flatten(-2)
        return (torch.cat((values, as_bytes(to_e4m3(rope.float())), in_lanes), dim=-1),)

    def decode(self, planes: tuple[torch.Tensor, ...], scale: float | torch.Tensor) -> torch.Tensor:
        values, rope, in_lanes = planes[0].split((LATENT // 2, ROPE_BYTES, SCALES), dim=-1)
        scales = in_lanes.unflatten(-1, (LANES, SCALES // LANES)).transpose(-1, -2).flatten(-2)
        latent = dequantize_nvfp4(values, scales)
        return torch.cat((latent, from_bytes(rope, torch.float8_e4m3fn).float()), dim=-1)
