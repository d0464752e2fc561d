"""Sums of contributions to keys that queries selected, in the order of queries: bitwise the same in every run."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton.language as tl

from flashlatte.kernels.triton.head_dims import padded
from flashlatte.runtime.triton_kernel import kernel

_MAX_GRID = 2**31 - 1


def pieces(s_q: int, topk: int, block_n: int, scratch_rows: int | None) -> Iterator[tuple[int, int, int, int]]:
    """(first token, tokens, first slot, slots) of the launches of a kernel with a program for ``block_n`` of a token's
    slots: within the largest grid and, if given, with a contribution for each of at most ``scratch_rows`` slots.
    """
    slots_at_once = topk if scratch_rows is None else min(topk, scratch_rows)
    tokens_at_once = _MAX_GRID // -(-slots_at_once // block_n)
    if scratch_rows is not None:
        tokens_at_once = scratch_rows // slots_at_once
    for first_token in range(0, s_q, tokens_at_once):
        for first_slot in range(0, topk, slots_at_once):
            tokens = min(tokens_at_once, s_q - first_token)
            yield first_token, tokens, first_slot, min(slots_at_once, topk - first_slot)


def add_by_key(
    contributions: torch.Tensor,
    indices: torch.Tensor,
    first_slot: int,
    lengths: torch.Tensor | None,
    total: torch.Tensor,
) -> None:
    """Add each row of ``contributions`` to the row of ``total`` that its index selects.

    Args:
        contributions: [at least tokens · slots, d], float32, contiguous; rows whose index does not count hold anything.
        indices: [tokens, slots]; those outside 0 to s_kv - 1 do not count.
        first_slot: position of the first of these slots in a token's list.
        lengths: [tokens]: how many of a token's indices count; None for all.
        total: [s_kv, d], float32, contiguous.
    """
    s_kv, width = total.shape
    valid = (indices >= 0) & (indices < s_kv)
    if lengths is not None:
        slot = torch.arange(first_slot, first_slot + indices.shape[1], device=indices.device)
        valid &= slot < lengths[:, None]
    keys = torch.where(valid, indices, s_kv).to(torch.int32).flatten()
    # Stable: the contributions to a key stay in the order of queries.
    sorted_keys, order = torch.sort(keys, stable=True)
    sum_by_key_kernel[(keys.numel(),)](
        contributions=contributions,
        sorted_keys=sorted_keys,
        order=order,
        count=keys.numel(),
        s_kv=s_kv,
        total=total,
        D=width,
        WIDTH=padded(width),
        num_warps=4,
    )


@kernel
def sum_by_key_kernel(
    contributions,
    sorted_keys,
    order,
    count: tl.int32,
    s_kv: tl.int32,
    total,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add rows ``order`` of ``contributions`` to rows ``sorted_keys`` of ``total``, those of a key one after the other.

    The program of a key's first contribution adds all of them. Keys from s_kv on select nothing.
    """
    position = tl.program_id(0)
    key = tl.load(sorted_keys + position)
    before = tl.load(sorted_keys + tl.maximum(position - 1, 0))
    if (key >= s_kv) | ((position > 0) & (before == key)):
        return
    cols = tl.arange(0, WIDTH)
    mask = cols < D
    target = total + key.to(tl.int64) * D + cols
    row_sum = tl.load(target, mask=mask, other=0.0)
    same = key >= 0
    while same:
        row = tl.load(order + position).to(tl.int64)
        row_sum += tl.load(contributions + row * D + cols, mask=mask, other=0.0)
        position += 1
        following = tl.load(sorted_keys + tl.minimum(position, count - 1))
        same = (position < count) & (following == key)
    tl.store(target, row_sum, mask=mask)
