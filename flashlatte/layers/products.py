"""Matrix products of layers: linear layers, and products of one shape for each head or group."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def linear(
    inputs: int, outputs: int, dtype: torch.dtype | None, device: torch.device | str | None, *, bias: bool = False
) -> nn.Linear:
    """A linear layer whose parameters are not initialised; on the CPU if ``device`` is None."""
    made: Any = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, dtype=dtype, device=device or "cpu")
    return made


def bmm_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """a [n, T, k] · b [n, k, m] into ``out`` [n, T, m], which may be a view of rows [T, n, m] as an operation reads
    them."""
    if torch.compiler.is_compiling():
        # torch.compile takes no out= that is not contiguous, and fuses the copy.
        out.copy_(torch.bmm(a, b))
    else:
        torch.bmm(a, b, out=out)
