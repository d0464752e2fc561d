"""Partial results of all heads on every rank, each over its own keys, into the result of each rank's own heads.

Three forms of the same sum, out = Σ e^(lse_r - lse) · out_r over ranks r:

* ``all_to_all``: each rank sends every other one that one's heads, out and lse in one buffer, and merges what it gets.
* ``reduce_scatter``: lse is gathered, each rank scales its own partial output, and these are summed by heads.
* ``all_reduce``: likewise, but every rank gets the sum of all heads.

Of T tokens, H heads and values of d numbers a rank sends (size - 1) / size of T · H · (2d + 4) bytes in the first form
for bf16, 4d in the second and twice that in the third, which sum in float32 so as to round once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from flashlatte.distributed import collectives
from flashlatte.ops.merge_states import merge_states

FORMS = ("all_to_all", "reduce_scatter", "all_reduce")
# Bytes at whose multiples a head's part of the buffer begins, so that kernels write and read rows 16 bytes at a time.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Partial:
    """Where attention over a rank's keys writes what ``merge`` takes.

    Attributes:
        out: [T, H, d], a view by heads first.
        lse: float32 [T, H], a view likewise.
        buffer: [H, width] that both lie in, a head's outputs before its lses; None where they travel apart.
    """

    out: torch.Tensor
    lse: torch.Tensor
    buffer: torch.Tensor | None


def allocate(tokens: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, form: str) -> Partial:
    if form != "all_to_all":
        out = torch.empty(heads, tokens, dim, dtype=dtype, device=device)
        lse = torch.empty(heads, tokens, dtype=torch.float32, device=device)
        return Partial(out.transpose(0, 1), lse.transpose(0, 1), None)
    lse_start, _ = _places(tokens, dim, dtype)
    lanes = 4 // dtype.itemsize
    buffer = torch.empty(heads, lse_start + _aligned(tokens * lanes, dtype), dtype=dtype, device=device)
    return Partial(*_views(buffer, tokens, dim), buffer)


def merge(partial: Partial, group: dist.ProcessGroup, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The result over the keys of all ranks, for this rank's share of the heads.

    Returns:
        out [T, H / size, d] in the partial output's dtype, and lse, natural logarithm, float32 [T, H / size]. Where
        every rank's lse is infinite, 0 and -inf.
    """
    if partial.buffer is not None:
        return _merge_received(partial.buffer, partial, group)
    corrected, lse = _correct(partial, group)
    mine = _own_heads(lse.shape[0], group)
    if form == "reduce_scatter":
        out = collectives.reduce_scatter(corrected, group)
    else:
        out = collectives.all_reduce(corrected, group)[mine]
    return out.to(partial.out.dtype).transpose(0, 1), lse[mine].transpose(0, 1)


def merge_all_heads(partial: Partial, group: dist.ProcessGroup, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``merge``, where every rank needs the result of all heads: [T, H, d] and [T, H]."""
    if form != "all_reduce":
        out, lse = merge(partial, group, form)
        return gather_heads(out, group), gather_heads(lse, group)
    corrected, lse = _correct(partial, group)
    out = collectives.all_reduce(corrected, group)
    return out.to(partial.out.dtype).transpose(0, 1), lse.transpose(0, 1)


def gather_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[T, h, …] of each rank's heads → [T, size · h, …], a view by heads first."""
    return collectives.all_gather(x.transpose(0, 1), group).transpose(0, 1)


def _merge_received(
    buffer: torch.Tensor, partial: Partial, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, dim = partial.out.shape
    received = collectives.all_to_all(buffer, group).unflatten(0, (group.size(), -1))
    parts = [_views(part, tokens, dim) for part in received]
    return merge_states([out for out, _ in parts], [lse for _, lse in parts])


def _correct(partial: Partial, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's summand, float32 [H, T, d], and the lse over all ranks [H, T]."""
    out, lse = partial.out.transpose(0, 1), partial.lse.transpose(0, 1)
    lses = collectives.all_gather(lse, group).unflatten(0, (group.size(), -1))  # [size, H, T]
    total = torch.logsumexp(lses.masked_fill(lses.isinf(), -torch.inf), dim=0)
    empty = lse.isinf()
    alpha = torch.exp(lse - total).masked_fill(empty, 0.0)
    # What stands in an empty row is nobody's result, and may be NaN.
    return out.float().masked_fill(empty.unsqueeze(-1), 0.0) * alpha.unsqueeze(-1), total


def _own_heads(heads: int, group: dist.ProcessGroup) -> slice:
    each = heads // group.size()
    return slice(group.rank() * each, (group.rank() + 1) * each)


def _views(buffer: torch.Tensor, tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, heads, dim] and lse [T, heads] in a buffer [heads, width]."""
    lse_start, lse_end = _places(tokens, dim, buffer.dtype)
    out = buffer[:, : tokens * dim].unflatten(1, (tokens, dim))
    lse = buffer[:, lse_start:lse_end].view(torch.float32)
    return out.transpose(0, 1), lse.transpose(0, 1)


def _places(tokens: int, dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Where a head's lses begin and end, in numbers of ``dtype``."""
    start = _aligned(tokens * dim, dtype)
    return start, start + tokens * (4 // dtype.itemsize)


def _aligned(numbers: int, dtype: torch.dtype) -> int:
    unit = _ALIGNMENT // dtype.itemsize
    return -(-numbers // unit) * unit
