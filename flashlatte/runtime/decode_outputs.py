"""Outputs of the decode operations."""

from __future__ import annotations

import torch

from flashlatte.runtime import checks


def prepare(
    q: torch.Tensor,
    head_dim_v: int,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    **inputs: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check or allocate out [b, s_q, h_q, head_dim_v] and lse [b, h_q, s_q] (float32) for q [b, s_q, h_q, d].

    ``out`` must not begin at the address of q or of one of ``inputs`` (keyed by argument name). A new lse is the
    transposed view of [b, s_q, h_q], as in FlashMLA.
    """
    batch, s_q, h_q, _ = q.shape
    out = checks.output_or_new("out", out, (batch, s_q, h_q, head_dim_v), q.dtype, q.device)
    checks.no_overlap("out", out, q=q, **inputs)
    if lse is None:
        strides = (s_q * h_q, 1, h_q)
        lse = torch.empty_strided((batch, h_q, s_q), strides, dtype=torch.float32, device=q.device)
    else:
        checks.output("lse", lse, (batch, h_q, s_q), (torch.float32,), q.device, unit_last_stride=False)
    return out, lse
