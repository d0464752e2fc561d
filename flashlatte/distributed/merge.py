"""Merges the ranks' partial outputs of all heads, each over its own keys, into the result of each rank's own heads.

Three forms of the same sum, out = Σ e^(lse_r - lse) · out_r over ranks r:

* ``all_to_all``: each rank sends the heads of every other rank, out and lse in one buffer, and merges what it receives.
* ``reduce_scatter``: lse is gathered, each rank scales its partial output, and these are summed by heads.
* ``all_reduce``: as ``reduce_scatter``, but every rank receives all heads.

For T tokens, H heads, values of d elements and bf16, a rank sends (size - 1) / size · T · H · b bytes: b = 2d + 4 in
the first form, 4d in the second, 8d in the third. The last two sum in float32 to round once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from flashlatte.distributed import collectives
from flashlatte.ops.merge_states import merge_states

FORMS = ("all_to_all", "reduce_scatter", "all_reduce")
# Alignment in bytes of a head's part of the buffer, so that kernels can use 16-byte loads and stores.
_ALIGNMENT = 16


@dataclass(frozen=True)
class RankPartial:
    """The partial output of attention over a rank's keys.

    Attributes:
        out: [T, H, d], a transposed view of heads-first memory.
        lse: float32 [T, H], a transposed view of heads-first memory.
        buffer: [H, width], which contains both, a head's outputs before its lses; None if they are sent separately.
    """

    out: torch.Tensor
    lse: torch.Tensor
    buffer: torch.Tensor | None


def allocate(tokens: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, form: str) -> RankPartial:
    if form != "all_to_all":
        out = torch.empty(heads, tokens, dim, dtype=dtype, device=device)
        lse = torch.empty(heads, tokens, dtype=torch.float32, device=device)
        return RankPartial(out.transpose(0, 1), lse.transpose(0, 1), None)
    lse_start, _ = _lse_range(tokens, dim, dtype)
    lanes = 4 // dtype.itemsize
    buffer = torch.empty(heads, lse_start + _aligned(tokens * lanes, dtype), dtype=dtype, device=device)
    return RankPartial(*_views(buffer, tokens, dim), buffer)


def merge(partial: RankPartial, group: dist.ProcessGroup, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The result over the keys of all ranks, for this rank's heads.

    Returns:
        out [T, H / size, d] in the partial output's dtype, and lse, natural logarithm, float32 [T, H / size]. Rows
        without keys on any rank have out 0 and lse -inf.
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


def merge_all_heads(partial: RankPartial, group: dist.ProcessGroup, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``merge`` for all heads on every rank: [T, H, d] and [T, H]."""
    if form != "all_reduce":
        out, lse = merge(partial, group, form)
        return gather_heads(out, group), gather_heads(lse, group)
    corrected, lse = _correct(partial, group)
    out = collectives.all_reduce(corrected, group)
    return out.to(partial.out.dtype).transpose(0, 1), lse.transpose(0, 1)


def gather_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather the heads of all ranks: [T, h, …] → [T, size · h, …], a transposed view."""
    return collectives.all_gather(x.transpose(0, 1), group).transpose(0, 1)


def _merge_received(
    buffer: torch.Tensor, partial: RankPartial, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, dim = partial.out.shape
    received = collectives.all_to_all(buffer, group).unflatten(0, (group.size(), -1))
    parts = [_views(part, tokens, dim) for part in received]
    return merge_states([out for out, _ in parts], [lse for _, lse in parts])


def _correct(partial: RankPartial, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's scaled partial output, float32 [H, T, d], and the lse over all ranks [H, T]."""
    out, lse = partial.out.transpose(0, 1), partial.lse.transpose(0, 1)
    lses = collectives.all_gather(lse, group).unflatten(0, (group.size(), -1))  # [size, H, T]
    total = torch.logsumexp(lses.masked_fill(lses.isinf(), -torch.inf), dim=0)
    empty = lse.isinf()
    alpha = torch.exp(lse - total).masked_fill(empty, 0.0)
    # The output of a row without keys is undefined, and may be NaN.
    return out.float().masked_fill(empty.unsqueeze(-1), 0.0) * alpha.unsqueeze(-1), total


def _own_heads(heads: int, group: dist.ProcessGroup) -> slice:
    each = heads // group.size()
    return slice(group.rank() * each, (group.rank() + 1) * each)


def _views(buffer: torch.Tensor, tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, heads, dim] and lse [T, heads] in a buffer [heads, width]."""
    lse_start, lse_end = _lse_range(tokens, dim, buffer.dtype)
    out = buffer[:, : tokens * dim].unflatten(1, (tokens, dim))
    lse = buffer[:, lse_start:lse_end].view(torch.float32)
    return out.transpose(0, 1), lse.transpose(0, 1)


def _lse_range(tokens: int, dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Begin and end of a head's lses in the buffer, in elements of ``dtype``."""
    start = _aligned(tokens * dim, dtype)
    return start, start + tokens * (4 // dtype.itemsize)


def _aligned(elements: int, dtype: torch.dtype) -> int:
    multiple = _ALIGNMENT // dtype.itemsize
    return -(-elements // multiple) * multiple
