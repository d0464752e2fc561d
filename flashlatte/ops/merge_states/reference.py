"""The merge in plain PyTorch: the specification, and the formula that autograd differentiates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flashlatte.kv_cache.fp8 import to_e4m3


class MergeStatesParams(NamedTuple):
    """The checked arguments of ``api.merge_states``.

    Attributes:
        context_tensor, context_tokens: a one-element tensor, or a number; both None if all entries are merged.
        scale_tensor, scale_value: scale of an e4m3 output; the value is used if the tensor is None.
    """

    outs: Sequence[torch.Tensor]
    lses: Sequence[torch.Tensor]
    out: torch.Tensor
    lse: torch.Tensor
    context_tensor: torch.Tensor | None
    context_tokens: int | None
    scale_tensor: torch.Tensor | None
    scale_value: float


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    context_tokens: torch.Tensor | int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of the first axis from ``context_tokens`` on (none if None) are copied from the last state."""
    out, lse = _merge(outs, lses, context_tokens)
    return out.to(outs[0].dtype), lse


@torch.no_grad()
def merge_states_into(params: MergeStatesParams) -> None:
    context_tokens = params.context_tokens if params.context_tensor is None else params.context_tensor
    out, lse = _merge(params.outs, params.lses, context_tokens)
    if params.out.dtype == torch.float8_e4m3fn:
        scale = out.new_tensor(params.scale_value) if params.scale_tensor is None else params.scale_tensor
        out = to_e4m3(out * (1.0 / scale))
    params.out.copy_(out)
    params.lse.copy_(lse)


def _merge(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], context_tokens: torch.Tensor | int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    part_lse = torch.stack(tuple(lses))
    empty = part_lse.isinf()
    copied = None
    if context_tokens is not None:
        token = torch.arange(part_lse.shape[1], device=part_lse.device)
        copied = (token >= context_tokens).view(-1, *[1] * (part_lse.dim() - 2))
        empty = empty | copied
    part_lse = part_lse.masked_fill(empty, float("-inf"))
    all_empty = empty.all(dim=0)
    # A finite value instead of -inf, so that -inf - -inf and its gradient are not NaN.
    part_lse = part_lse.masked_fill(all_empty, 0.0)
    lse = torch.logsumexp(part_lse, dim=0)
    weights = torch.softmax(part_lse, dim=0)
    parts = torch.stack(tuple(outs)).float().masked_fill(empty.unsqueeze(-1), 0.0)
    out = (weights.unsqueeze(-1) * parts).sum(dim=0)
    lse = lse.masked_fill(all_empty, float("-inf"))
    if copied is None:
        return out, lse
    return torch.where(copied.unsqueeze(-1), outs[-1].float(), out), torch.where(copied, lses[-1], lse)
