"""``index_query`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch

from flashlatte.kernels.rope import rotate
from flashlatte.kv_cache.fp4 import quantize_mxfp4
from flashlatte.kv_cache.hadamard import signs
from flashlatte.kv_cache.index_formats import quantize_rows


def index_query(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    rope_first: bool,
    interleaved: bool,
    hadamard: bool,
    weight_scale: float,
    smallest_amax: float,
    scale_rounding: str,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    folded: torch.Tensor,
) -> None:
    head_dim = q.shape[-1]
    x = q.to(torch.float32, copy=True)
    if cos_sin is not None and positions is not None:
        rope_dim = cos_sin.shape[1]
        at = 0 if rope_first else head_dim - rope_dim
        x[..., at : at + rope_dim] = rotate(x[..., at : at + rope_dim], cos_sin, positions, interleaved)
    if hadamard:
        # Models round rotated values to their dtype before the transform.
        x = x.to(q.dtype).float() @ signs(head_dim, q.device) * head_dim**-0.5
    if scales is not None:
        codes, exponents = quantize_mxfp4(x)
        values.copy_(codes)
        scales.copy_(exponents)
        folded.copy_(weights.float() * weight_scale)
        return
    codes, factors = quantize_rows(x, scale_rounding, smallest_amax)
    values.copy_(codes.view(torch.uint8))
    folded.copy_(weights.float() * factors * weight_scale)
