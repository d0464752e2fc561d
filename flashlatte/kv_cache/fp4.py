"""mxfp4: e2m1 values, two a byte, with one E8M0 scale for each 32 of a row (OCP Microscaling 1.0)."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.fp8 import as_bytes, from_bytes, round_up_to_power_of_two

TILE = 32
E2M1_MAX = 6.0
# Magnitudes by code; bit 3 is the sign.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The nearest magnitude changes here, by code; of two as near the even code is taken.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
# The smallest scale is a normal number, so that its reciprocal is one.
SMALLEST_SCALE = 2.0**-126


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15, uint8, of float32 x, saturating at 6. NaN has no code: it gives 0."""
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for index, midpoint in enumerate(_MIDPOINTS):
        code += magnitude > midpoint if index % 2 == 0 else magnitude >= midpoint
    return code | (x.signbit() & ~x.isnan()).to(torch.uint8) << 3


def from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """float32 of codes 0 to 15."""
    values = (*E2M1_MAGNITUDES, *(-magnitude for magnitude in E2M1_MAGNITUDES))
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes.long()]


def quantize_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [..., n · 32] to packed bytes [..., n · 16] and E8M0 bytes [..., n], both uint8.

    The scale is amax / 6 rounded up to a power of two. A byte holds value 2i in its low half and 2i + 1 in its high
    half. A tile with a NaN or an infinity has a NaN scale.
    """
    tiles = x.float().unflatten(-1, (-1, TILE))
    amax = tiles.abs().amax(dim=-1)
    scales = round_up_to_power_of_two((amax / torch.full_like(amax, E2M1_MAX)).clamp_min(SMALLEST_SCALE))
    scales = torch.where(amax.isfinite(), scales, torch.nan)
    codes = to_e2m1(tiles / scales.unsqueeze(-1)).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, as_bytes(scales.to(torch.float8_e8m0fnu))


def dequantize_mxfp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [..., n · 32] of packed bytes [..., n · 16] and E8M0 bytes [..., n]."""
    values = from_e2m1(torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2))
    factors = from_bytes(scales, torch.float8_e8m0fnu).float()
    return (values.unflatten(-1, (-1, TILE)) * factors.unsqueeze(-1)).flatten(-2)
