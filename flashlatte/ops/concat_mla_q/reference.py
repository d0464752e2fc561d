"""``concat_mla_q`` in plain PyTorch: the specification."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.fp8 import raw_view


@torch.no_grad()
def concat_mla_q(ql_nope: torch.Tensor, q_pe: torch.Tensor, out: torch.Tensor) -> None:
    raw_view(out).copy_(torch.cat((raw_view(ql_nope), raw_view(q_pe)), dim=-1))
