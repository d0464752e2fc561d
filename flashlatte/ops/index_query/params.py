"""The arguments of an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch


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
