"""Sums of contributions to keys that queries selected, in the order of queries: bitwise the same in every run."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton.language as tl

from flashlatte.kernels.triton.head_dims import padded
from flashlatte.runtime.triton_kernel import kernel

_MAX_GRID = _MAX_INT32 = 2**31 - 1
# Keys that are sorted at once, where a piece has fewer.
SORTED_ENTRIES = 2**20
# Entries of a program.
_SEGMENT = 16


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


class KeySums:
    """Adds contributions, one piece of query tokens after the other, to the rows of the keys that the tokens selected.

    The keys of several pieces are sorted at once.
    """

    def __init__(self, indices: torch.Tensor, lengths: torch.Tensor | None, total: torch.Tensor) -> None:
        """
        Args:
            indices: [s_q, 1, topk]; those outside 0 to s_kv - 1 do not count.
            lengths: [s_q]: how many of a token's indices count; None for all.
            total: [s_kv, d], float32, contiguous: what is added to.
        """
        self._indices, self._lengths, self._total = indices, lengths, total
        self._sorted: _SortedKeys | None = None

    def add(self, contributions: torch.Tensor, first_token: int, tokens: int, first_slot: int, slots: int) -> None:
        """Add a piece. ``contributions``: [at least tokens · slots, d], float32, contiguous; rows whose index does not
        count hold anything."""
        piece = None if self._sorted is None else self._sorted.piece_of(first_token, tokens, first_slot, slots)
        if self._sorted is None or piece is None:
            self._sorted, piece = self._sort(first_token, tokens, first_slot, slots), 0
        s_kv, width = self._total.shape
        count = tokens * slots
        sum_by_key_kernel[(-(-count // _SEGMENT),)](
            contributions=contributions,
            sorted_keys=self._sorted.keys,
            order=self._sorted.order,
            first=piece * self._sorted.piece_tokens * slots,
            count=count,
            first_key=piece * (s_kv + 1),
            s_kv=s_kv,
            total=self._total,
            D=width,
            WIDTH=padded(width),
            SEGMENT=_SEGMENT,
            num_warps=4,
        )

    def _sort(self, first_token: int, tokens: int, first_slot: int, slots: int) -> _SortedKeys:
        """Sort the keys of the piece and of those like it that follow: by piece, then by key, then in order."""
        s_kv = self._total.shape[0]
        pieces_at_once = min(
            SORTED_ENTRIES // (tokens * slots), _MAX_INT32 // (s_kv + 1), -(-self._indices.shape[0] // tokens)
        )
        launched = slice(first_token, first_token + max(pieces_at_once, 1) * tokens)
        indices = self._indices[launched, 0, first_slot : first_slot + slots]
        valid = (indices >= 0) & (indices < s_kv)
        if self._lengths is not None:
            slot = torch.arange(first_slot, first_slot + slots, device=indices.device)
            valid &= slot < self._lengths[launched, None]
        keys = torch.where(valid, indices, s_kv).to(torch.int32)
        if len(keys) > tokens:
            piece = torch.arange(len(keys), dtype=torch.int32, device=keys.device) // tokens
            keys += (piece * (s_kv + 1))[:, None]
        # Stable: the contributions to a key stay in the order of queries.
        return _SortedKeys(*torch.sort(keys.flatten(), stable=True), first_token, len(keys), tokens, first_slot, slots)


class _SortedKeys(NamedTuple):
    """The keys of pieces of ``piece_tokens`` tokens each (the last may have fewer), those of piece i plus
    i · (s_kv + 1), and the place of each before the sort."""

    keys: torch.Tensor
    order: torch.Tensor
    first_token: int
    tokens: int
    piece_tokens: int
    first_slot: int
    slots: int

    def piece_of(self, first_token: int, tokens: int, first_slot: int, slots: int) -> int | None:
        """The number of a piece, or None if it is not among these."""
        piece, rest = divmod(first_token - self.first_token, self.piece_tokens)
        whole = tokens == min(self.piece_tokens, self.tokens - piece * self.piece_tokens)
        same = rest == 0 and piece >= 0 and whole and (first_slot, slots) == (self.first_slot, self.slots)
        return piece if same else None


@kernel
def sum_by_key_kernel(
    contributions,
    sorted_keys,
    order,
    first: tl.int32,
    count: tl.int32,
    first_key: tl.int32,
    s_kv: tl.int32,
    total,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Add rows of ``contributions`` to rows of ``total``, those of a key one after the other: rows ``order`` - first to
    rows ``sorted_keys`` - first_key, for the ``count`` entries of both from ``first`` on.

    A program adds the contributions to the keys whose first one is among its SEGMENT entries: most entries are not a
    key's first, and a program for each would begin only to end. Keys from s_kv on select nothing.
    """
    begin = first + tl.program_id(0) * SEGMENT
    end = first + count
    cols = tl.arange(0, WIDTH)
    mask = cols < D
    for entry in range(begin, tl.minimum(begin + SEGMENT, end)):
        key = tl.load(sorted_keys + entry) - first_key
        before = tl.load(sorted_keys + tl.maximum(entry - 1, first)) - first_key
        if (key < s_kv) & ((entry == first) | (before != key)):
            target = total + key.to(tl.int64) * D + cols
            row_sum = tl.load(target, mask=mask, other=0.0)
            position = entry
            row = tl.load(order + position) - first
            same = key >= 0
            while same:
                contribution = tl.load(contributions + row.to(tl.int64) * D + cols, mask=mask, other=0.0)
                # The next row is known before this one has arrived.
                position += 1
                following = tl.minimum(position, end - 1)
                same = (position < end) & (tl.load(sorted_keys + following) - first_key == key)
                row = tl.load(order + following) - first
                row_sum += contribution
            tl.store(target, row_sum, mask=mask)
