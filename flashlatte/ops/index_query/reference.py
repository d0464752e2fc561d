"""``index_query``: the arguments, and the specification in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kernels.rope import rotate
from flashlatte.kv_cache.fp4 import quantize_mxfp4
from flashlatte.kv_cache.hadamard import signs
from flashlatte.kv_cache.index_formats import quantize_rows


class IndexQueryParams(NamedTuple):
    """The checked arguments of ``api.index_query`` and ``api.index_query_mxfp4``.

    Attributes:
        weight_scale: the factor of all weights, beside the scales of e4m3 heads.
        values: e4m3 bytes, or e2m1 pairs if there are ``scales``.
        folded: the weights times these factors.
    """

    q: torch.Tensor
    weights: torch.Tensor
    cos_sin: torch.Tensor | None
    positions: torch.Tensor | None
    rope_first: bool
    interleaved: bool
    hadamard: bool
    weight_scale: float
    smallest_amax: float
    scale_rounding: str
    values: torch.Tensor
    scales: torch.Tensor | None
    folded: torch.Tensor


def index_query(params: IndexQueryParams) -> None:
    q, cos_sin, head_dim = params.q, params.cos_sin, params.q.shape[-1]
    x = q.to(torch.float32, copy=True)
    if cos_sin is not None and params.positions is not None:
        rope_dim = cos_sin.shape[1]
        at = 0 if params.rope_first else head_dim - rope_dim
        rotated = slice(at, at + rope_dim)
        x[..., rotated] = rotate(x[..., rotated], cos_sin, params.positions, params.interleaved)
    if params.hadamard:
        # Models round rotated values to their dtype before the transform.
        x = x.to(q.dtype).float() @ signs(head_dim, q.device) * head_dim**-0.5
    weights = params.weights.float()
    if params.scales is not None:
        codes, exponents = quantize_mxfp4(x)
        params.scales.copy_(exponents)
    else:
        codes, factors = quantize_rows(x, params.scale_rounding, params.smallest_amax)
        weights = weights * factors
    params.values.copy_(codes.view(torch.uint8))
    params.folded.copy_(weights * params.weight_scale)
