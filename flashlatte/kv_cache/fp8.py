"""e4m3 values with a scale per tile of a row."""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
SMALLEST_POWER_OF_TWO_INPUT = 1e-4
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
SCALE_ROUNDINGS = ("power_of_two", "exact")


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Saturating cast of float32 values; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def divide(x: torch.Tensor, divisor: float | torch.Tensor) -> torch.Tensor:
    """x / divisor, correctly rounded: on a GPU, PyTorch divides by a Python number by multiplying by its reciprocal."""
    return x / (divisor if isinstance(divisor, torch.Tensor) else torch.full_like(x[..., :1], divisor))


def round_up_to_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2 x) for positive float32 x, exact; infinities and NaN are returned unchanged."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa · 2^exponent, mantissa in [0.5, 1)
    rounded = torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))
    return torch.where(x.isfinite(), rounded, x)


def quantize_tiles(x: torch.Tensor, tile: int, scale_rounding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [..., n · tile] float values to e4m3 [..., n · tile] and float32 scales [..., n].

    The scale is the tile's amax / 448: rounded up to a power of two of at least 2^-13 ("power_of_two", as in FlashMLA's
    quantizer), or not rounded ("exact", as in vLLM up to 0.26). A tile with a NaN gets a NaN scale.
    """
    tiles = x.float().unflatten(-1, (-1, tile))
    scales = divide(tiles.abs().amax(dim=-1), E4M3_MAX)
    if scale_rounding == "power_of_two":
        scales = round_up_to_power_of_two(scales.clamp_min(SMALLEST_POWER_OF_TWO_INPUT))
    else:
        scales = scales.clamp_min(SMALLEST_NORMAL)
    return to_e4m3(tiles / scales.unsqueeze(-1)).flatten(-2), scales


def dequantize_tiles(values: torch.Tensor, scales: torch.Tensor, tile: int) -> torch.Tensor:
    """float32 [..., n · tile] from e4m3 values and float32 scales [..., n]."""
    return (values.float().unflatten(-1, (-1, tile)) * scales.unsqueeze(-1)).flatten(-2)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    # A negated view, such as the imaginary part of a conjugate, has no view in another dtype.
    return x.contiguous().resolve_neg().view(torch.uint8)


def from_bytes(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if x.shape[-1] == 0:
        return x.to(dtype)
    # view(dtype) requires a beginning and strides that the itemsize divides, also the strides of axes of size 1.
    return x.clone(memory_format=torch.contiguous_format).view(dtype)


def raw_view(cache: torch.Tensor) -> torch.Tensor:
    """A one-byte cache as uint8, other caches unchanged: not every device supports indexing of float8 tensors."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
