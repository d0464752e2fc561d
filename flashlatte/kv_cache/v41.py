"""``v41`` and ``v41_fp4``: DeepSeek-V4.1's caches, with all 512 values of a row quantized, including the rotated ones.

``v41``, 528 bytes per token (mxfp8):

    bytes 0 to 511    448 latent values and 64 rotated ones, e4m3
    bytes 512 to 527  sixteen E8M0 scales, one for 32 values

``v41_fp4``, 288 bytes per token (nvfp4 without a per-tensor scale), FlashMLA's format of a second cache next to
``v41``:

    bytes 0 to 255    the 512 values, e2m1, two per byte, the even one in the low half
    bytes 256 to 287  thirty-two e4m3 scales, one for 16 values

A token's bytes are contiguous, as in FlashMLA's tests/quant.py. FlashMLA's first release for V4.1, and vLLM and SGLang
at that time, stored all scales of a page after all of its values. Those pages have the same size but are incompatible.
Tokens of ``v32_no_rope`` are as long as those of ``v41``, so the width of a cache does not identify the format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte.kv_cache.formats import BlockScaling, ByteFormat, CacheFormat, Plane, PlaneRows, Scale
from flashlatte.kv_cache.fp4 import NVFP4_BLOCK, dequantize_nvfp4, quantize_nvfp4
from flashlatte.kv_cache.fp8 import as_bytes, dequantize_tiles, from_bytes, quantize_tiles

ROW = 512
BLOCK = 32


@dataclass(frozen=True)
class V41Row(ByteFormat):
    """Common base: rows and values of 512 elements, 448 latent and 64 rotated."""

    has_exact_scales = False

    head_dim: int = ROW

    @property
    def value_dim(self) -> int:
        return self.head_dim


@dataclass(frozen=True)
class V41Format(V41Row):
    """528 bytes per token: e4m3 with an E8M0 scale per 32 values.

    The error is at most half a step of e4m3 at the block's scale: 2^-4 of the value or 2^-10 of the scale, whichever is
    greater. The scale is less than amax / 224, and at least 2^-13.
    """

    name = "v41"
    block_scaling = BlockScaling(
        fp4=False, block=BLOCK, blocks=ROW // BLOCK, scale_offset=ROW, token_bytes=ROW + ROW // BLOCK
    )

    def second_format(self, width: int) -> CacheFormat:
        fp4 = V41Fp4Format()
        return fp4 if width == fp4.record_width else self

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane(ROW + ROW // BLOCK, torch.uint8),)

    def encode(self, latent: torch.Tensor, rope: torch.Tensor, scale: Scale, scale_rounding: str) -> PlaneRows:
        values, scales = quantize_tiles(torch.cat((latent, rope), dim=-1), BLOCK, "power_of_two")
        return (torch.cat((as_bytes(values), as_bytes(scales.to(torch.float8_e8m0fnu))), dim=-1),)

    def decode(self, planes: PlaneRows, scale: Scale) -> torch.Tensor:
        values, exponents = planes[0].split((ROW, ROW // BLOCK), dim=-1)
        scales = from_bytes(exponents, torch.float8_e8m0fnu).float()
        return dequantize_tiles(from_bytes(values, torch.float8_e4m3fn), scales, BLOCK)


@dataclass(frozen=True)
class V41Fp4Format(V41Row):
    """288 bytes per token: e2m1 with an e4m3 scale per 16 values, amax / 6 rounded to nearest.

    The error of a value is at most 17/96 of amax in a block with amax from 6 · 2^-6 to 2,688: half of e2m1's largest
    step (2 of 6), with a scale up to 1/16 too large. It is at most 2^-6 in a block with a smaller amax. Values above
    2,688 saturate.
    """

    name = "v41_fp4"
    # A float8_e4m3fn cache may be 288 wide because its rows are.
    inferred_dtypes = (torch.uint8, torch.int8)
    block_scaling = BlockScaling(
        fp4=True,
        block=NVFP4_BLOCK,
        blocks=ROW // NVFP4_BLOCK,
        scale_offset=ROW // 2,
        token_bytes=ROW // 2 + ROW // NVFP4_BLOCK,
    )

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane(ROW // 2 + ROW // NVFP4_BLOCK, torch.uint8),)

    def encode(self, latent: torch.Tensor, rope: torch.Tensor, scale: Scale, scale_rounding: str) -> PlaneRows:
        return (torch.cat(quantize_nvfp4(torch.cat((latent, rope), dim=-1), rounds_up=False), dim=-1),)

    def decode(self, planes: PlaneRows, scale: Scale) -> torch.Tensor:
        return dequantize_nvfp4(*planes[0].split((ROW // 2, ROW // NVFP4_BLOCK), dim=-1))
