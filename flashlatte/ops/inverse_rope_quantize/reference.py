"""``inverse_rope_quantize`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch

from flashlatte.kernels.rope import rotate_tail
from flashlatte.kv_cache.index_formats import quantize_rows

TILE, SMALLEST_AMAX = 128, 1e-10


def inverse_rope_quantize(
    o: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
) -> None:
    tokens, groups = o.shape[0], values.shape[0]
    x = rotate_tail(o.float(), cos_sin, positions, inverse=True)
    tiles = x.view(tokens, groups, -1, TILE).transpose(0, 1)  # [groups, T, d / 128, 128]
    codes, factors = quantize_rows(tiles, "power_of_two", SMALLEST_AMAX)
    values.copy_(codes.view(torch.uint8).flatten(-2))
    scales.zero_()
    if scales.dtype == torch.int32:
        exponents = (factors.view(torch.int32) >> 23).to(torch.uint8)
        factors = exponents.view(torch.int32)
    scales[:, :, :tokens] = factors.transpose(1, 2)
