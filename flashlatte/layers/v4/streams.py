"""The streams of hidden states that DeepSeek-V4's layers share, with the parameters of transformers' modules."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from flashlatte.ops.index_weights import index_weights
from flashlatte.ops.mhc import mhc_pre

# Up to so many, one kernel in float32 is the fastest: 28 µs of 31 (H100, 16,384 numbers of a token by 24).
_FEW_ROWS = 512


def read_streams(
    module: Any, streams: torch.Tensor, backend: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``mhc_pre`` of streams [T, n, hidden_size] by a ``DeepseekV4HyperConnection``: two launches where that takes
    140."""
    return mhc_pre(
        streams,
        _project(streams.flatten(1), module.fn.float(), backend),
        module.base.float(),
        module.scale.float(),
        rms_eps=module.input_norm.eps,
        eps=module.hc_eps,
        iterations=module.hc_sinkhorn_iters,
        backend=backend,
    )


def _project(rows: torch.Tensor, weight: torch.Tensor, backend: str | None) -> torch.Tensor:
    """rows [T, inputs] · weightᵀ in float32."""
    if rows.shape[0] <= _FEW_ROWS:
        return index_weights(rows, weight, backend=backend)
    if rows.is_cuda and rows.dtype == torch.bfloat16 and not torch.compiler.is_compiling():
        # Tensor cores add products of bf16 numbers up in float32: of 4,096 rows in a fifth of the time of a product in
        # float32, with an error of 1e-5 of the largest number instead of 1e-6.
        products = torch.mm(rows, in_parts(weight).T, out_dtype=torch.float32)
        return products.unflatten(1, (3, -1)).sum(dim=1)
    return functional.linear(rows.float(), weight)


def in_parts(weight: torch.Tensor) -> torch.Tensor:
    """Three bf16 matrices [3 · numbers, inputs] that add up to a float32 one: 8 bits of its numbers each."""
    first = weight.bfloat16()
    rest = weight - first
    second = rest.bfloat16()
    return torch.cat((first, second, (rest - second).bfloat16()))
