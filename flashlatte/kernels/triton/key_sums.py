"""Sums of contributions to selected keys, in the order of queries, so that they are bitwise reproducible."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.config import padded
from flashlatte.runtime.triton_kernel import kernel

_MAX_GRID = _MAX_INT32 = 2**31 - 1
# Minimum number of keys of a sort: several pieces are sorted together, because fewer keys do not fill a large GPU.
SORTED_ENTRIES = 2**22
# Entries of a program.
_SEGMENT = 16


def pieces(s_q: int, topk: int, block_n: int, scratch_rows: int | None) -> Iterator[tuple[int, int, int, int]]:
    """(first token, tokens, first slot, slots) of the launches of a kernel in which a program processes ``block_n``
    slots of a token. A launch has at most the maximum number of programs and, if given, ``scratch_rows`` slots.
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
    """Adds contributions to the rows of the selected keys, one piece of query tokens after the other.

    The keys of several pieces are sorted at once.
    """

    def __init__(self, indices: torch.Tensor, lengths: torch.Tensor | None, total: torch.Tensor) -> None:
        """
        Args:
            indices: [s_q, 1, topk]; values outside 0 to s_kv - 1 are ignored.
            lengths: [s_q], the number of a token's indices that are used; None for all.
            total: [s_kv, d], float32, contiguous; ``add`` adds to it.
        """
        self._indices, self._lengths, self._total = indices, lengths, total
        self._sorted: _SortedKeys | None = None

    def add(self, contributions: torch.Tensor, first_token: int, tokens: int, first_slot: int, slots: int) -> None:
        """Add a piece. ``contributions``: [at least tokens · slots, d], float32, contiguous; rows of ignored indices
        may hold any values."""
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
        """Sort the keys of this piece and of the following ones of the same size: by piece, then by key, stably."""
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
    """Sorted keys of pieces of ``piece_tokens`` tokens each (the last may have fewer), and the index of each before the
    sort. The keys of piece i are increased by i · (s_kv + 1)."""

    keys: torch.Tensor
    order: torch.Tensor
    first_token: int
    tokens: int
    piece_tokens: int
    first_slot: int
    slots: int

    def piece_of(self, first_token: int, tokens: int, first_slot: int, slots: int) -> int | None:
        """The index of a piece, or None if it is not among the sorted ones."""
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
    """For entries i from ``first`` to ``first`` + ``count`` - 1, add row order[i] - first of ``contributions`` to row
    sorted_keys[i] - first_key of ``total``. The rows of a key are added one after the other.

    A program processes the keys whose first entry is among its SEGMENT entries. (With a program for each entry, most
    would exit at once, because most entries are not a key's first.) Keys from s_kv on are ignored.

    Four rows of a key are loaded while the previous four are added in order. Loaded one by one, each row would cost a
    memory latency.
    """
    begin = first + tl.program_id(0) * SEGMENT
    end = first + count
    cols = tl.arange(0, WIDTH)
    mask = cols < D
    entries = begin + tl.arange(0, SEGMENT)
    keys = tl.load(sorted_keys + entries, mask=entries < end, other=0)
    before = tl.load(sorted_keys + entries - 1, mask=(entries > first) & (entries < end), other=-1)
    is_first = (entries < end) & (keys - first_key < s_kv) & (before != keys)
    entry = tl.min(tl.where(is_first, entries, end), axis=0)
    while entry < end:
        key = tl.load(sorted_keys + entry)
        target = total + (key - first_key).to(tl.int64) * D + cols
        row_sum = tl.load(target, mask=mask, other=0.0)
        loaded = _load_rows(contributions, _rows_of(key, sorted_keys, order, entry, first, end), cols, mask, D)
        position = entry + 4
        rows = _rows_of(key, sorted_keys, order, position, first, end)
        more = entry >= 0
        while more:
            following = _load_rows(contributions, rows, cols, mask, D)
            more = rows[0] >= 0
            position += 4
            rows = _rows_of(key, sorted_keys, order, position, first, end)
            row_sum = row_sum + loaded[0] + loaded[1] + loaded[2] + loaded[3]
            loaded = following
        tl.store(target, row_sum, mask=mask)
        entry = tl.min(tl.where(is_first & (entries > entry), entries, end), axis=0)


@triton.jit
def _rows_of(key, sorted_keys, order, position, first, end):
    """Rows of the contributions at four positions, -1 for rows that do not belong to the key."""
    return (
        _row_of(key, sorted_keys, order, position, first, end),
        _row_of(key, sorted_keys, order, position + 1, first, end),
        _row_of(key, sorted_keys, order, position + 2, first, end),
        _row_of(key, sorted_keys, order, position + 3, first, end),
    )


@triton.jit
def _row_of(key, sorted_keys, order, position, first, end):
    in_use = position < end
    same = tl.load(sorted_keys + position, mask=in_use, other=-1) == key
    row = tl.load(order + position, mask=in_use, other=0) - first
    return tl.where(same, row, -1)


@triton.jit
def _load_rows(contributions, rows, cols, mask, D: tl.constexpr):
    return (
        _load_row(contributions, rows[0], cols, mask, D),
        _load_row(contributions, rows[1], cols, mask, D),
        _load_row(contributions, rows[2], cols, mask, D),
        _load_row(contributions, rows[3], cols, mask, D),
    )


@triton.jit
def _load_row(contributions, row, cols, mask, D: tl.constexpr):
    """A row of [n, D], or zeros for row -1."""
    return tl.load(contributions + row.to(tl.int64) * D + cols, mask=mask & (row >= 0), other=0.0)
