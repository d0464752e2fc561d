"""Matrix products of one shape for each head or group, written where the next operation reads them."""

from __future__ import annotations

import torch


def bmm_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """a [n, T, k] · b [n, k, m] into ``out`` [n, T, m], which may be a view of rows [T, n, m]."""
    if torch.compiler.is_compiling():
        # torch.compile takes no out= that is not contiguous, and fuses the copy.
        out.copy_(torch.bmm(a, b))
    else:
        torch.bmm(a, b, out=out)
