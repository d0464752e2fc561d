"""e2m1 values, two per byte, with a scale per block of a row.

mxfp4 has an E8M0 scale per 32 values (OCP Microscaling 1.0), nvfp4 an e4m3 scale per 16.
"""

from __future__ import annotations

import torch

from flashlatte.kv_cache.fp8 import E4M3_MAX, as_bytes, divide, from_bytes, round_up_to_power_of_two, to_e4m3

TILE = 32
NVFP4_BLOCK = 16
E2M1_MAX = 6.0
# Magnitudes by code; bit 3 is the sign.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The midpoints between magnitudes, by code; ties round to the even code.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
# A normal number, so that its reciprocal is one.
SMALLEST_SCALE = 2.0**-126
# The smallest positive e4m3 value, and the byte of the largest.
SMALLEST_E4M3 = 2.0**-9
_LARGEST_E4M3_BYTE = 0x7E


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15, uint8, of float32 x, saturating at 6. e2m1 has no NaN: NaN becomes 0."""
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for index, midpoint in enumerate(_MIDPOINTS):
        code += magnitude > midpoint if index % 2 == 0 else magnitude >= midpoint
    return code | (x.signbit() & ~x.isnan()).to(torch.uint8) << 3


def from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of codes 0 to 15."""
    values = (*E2M1_MAGNITUDES, *(-magnitude for magnitude in E2M1_MAGNITUDES))
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes.long()]


def pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n] of codes [..., 2n]: code 2i in the low half of byte i, code 2i + 1 in its high half."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of ``pack_pairs``."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def quantize_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [..., n · 32] to packed bytes [..., n · 16] and E8M0 bytes [..., n], both uint8.

    The scale is amax / 6 rounded up to a power of two. A byte has value 2i in its low half and 2i + 1 in its high half.
    A tile with a NaN or an infinity gets a NaN scale.
    """
    tiles = x.float().unflatten(-1, (-1, TILE))
    amax = tiles.abs().amax(dim=-1)
    scales = round_up_to_power_of_two(divide(amax, E2M1_MAX).clamp_min(SMALLEST_SCALE))
    scales = torch.where(amax.isfinite(), scales, torch.nan)
    codes = to_e2m1(tiles / scales.unsqueeze(-1)).flatten(-2)
    return pack_pairs(codes), as_bytes(scales.to(torch.float8_e8m0fnu))


def dequantize_mxfp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [..., n · 32] of packed bytes [..., n · 16] and E8M0 bytes [..., n]."""
    values = from_e2m1(unpack_pairs(packed))
    factors = from_bytes(scales, torch.float8_e8m0fnu).float()
    return (values.unflatten(-1, (-1, TILE)) * factors.unsqueeze(-1)).flatten(-2)


def quantize_nvfp4(x: torch.Tensor, rounds_up: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [..., n · 16] to packed bytes [..., n · 8] and e4m3 bytes [..., n], both uint8.

    The scale is amax / 6, at least 2^-9 and at most 448, in e4m3, rounded to nearest or (``rounds_up``) up. Values
    beyond 2,688 therefore saturate. A block with a NaN or an infinity has a NaN scale.
    """
    blocks = x.float().unflatten(-1, (-1, NVFP4_BLOCK))
    amax = blocks.abs().amax(dim=-1)
    wanted = divide(amax, E2M1_MAX).clamp(SMALLEST_E4M3, E4M3_MAX)
    scales = as_bytes(to_e4m3(wanted))
    if rounds_up:
        # The bytes of positive e4m3 values are in ascending order.
        scales = (scales + (from_bytes(scales, torch.float8_e4m3fn).float() < wanted)).clamp_max(_LARGEST_E4M3_BYTE)
    scales = torch.where(amax.isfinite(), scales, 0x7F)
    codes = to_e2m1(blocks / from_bytes(scales, torch.float8_e4m3fn).float().unsqueeze(-1)).flatten(-2)
    return pack_pairs(codes), scales


def dequantize_nvfp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [..., n · 16] of packed bytes [..., n · 8] and e4m3 bytes [..., n]."""
    values = from_e2m1(unpack_pairs(packed))
    factors = from_bytes(scales, torch.float8_e4m3fn).float()
    return (values.unflatten(-1, (-1, NVFP4_BLOCK)) * factors.unsqueeze(-1)).flatten(-2)
