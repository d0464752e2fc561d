"""The merge in plain PyTorch: the specification, and the formula that gradients go through."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def merge_states(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    part_lse = torch.stack(tuple(lses))
    empty = part_lse.isinf()
    part_lse = part_lse.masked_fill(empty, float("-inf"))
    all_empty = empty.all(dim=0)
    # A finite stand-in keeps -inf - -inf, and its gradient, from being NaN.
    part_lse = part_lse.masked_fill(all_empty, 0.0)
    lse = torch.logsumexp(part_lse, dim=0)
    weights = torch.softmax(part_lse, dim=0)
    parts = torch.stack(tuple(outs)).float().masked_fill(empty.unsqueeze(-1), 0.0)
    out = (weights.unsqueeze(-1) * parts).sum(dim=0)
    return out.to(outs[0].dtype), lse.masked_fill(all_empty, float("-inf"))


@torch.no_grad()
def merge_states_into(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], out: torch.Tensor, lse: torch.Tensor
) -> None:
    merged_out, merged_lse = merge_states(outs, lses)
    out.copy_(merged_out)
    lse.copy_(merged_lse)
