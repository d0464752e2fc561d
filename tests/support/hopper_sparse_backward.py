"""The tile algorithm of sparse attention's Hopper kernels in PyTorch: the same tiles, roundings and addresses.

It takes what a launch passes, so it tests the launcher too. It does not test what runs at the same time: barriers, and
buffers that are used again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashlatte.ops.sparse_attention.hopper import state


class Emulated:
    """Stands in for a kernel: runs ``program`` for each program of a grid, with a launch's arguments."""

    def __init__(self, program: Callable[..., None]) -> None:
        self.program = program

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*records: Any, num_warps: int, **named: Any) -> None:
            assert num_warps == 4
            for program in range(grid[0]):
                self.program(program, *records, **named)

        return launch


def query_gradients(program, rows, keys, selection, piece, dq, topk, softmax_scale, HAS_ROPE):
    token, head_block = piece.first_token + program // piece.head_blocks, program % piece.head_blocks
    head, count = head_block * 64, _num_selected(selection, token, topk)
    steps = max(-(-count // 64), 1)
    dtype = keys.start.dtype
    q = torch.cat([_box(rows.q, token, head, column) for column in range(0, 576 if HAS_ROPE else 512, 64)], 1).float()
    dout = torch.cat([_box(rows.dout, token, head, column) for column in range(0, 512, 64)], 1).float()
    lse, weight, delta = (
        torch.cat([rows.sums[number, token * rows.h_q :][: rows.h_q][head : head + 64], torch.full((64,), other)])[:64]
        for number, other in enumerate((torch.inf, 0.0, 0.0))
    )
    total = torch.zeros_like(q)
    for step in range(steps):
        index, valid = _indices(selection, token, step * 64, count)
        k = torch.zeros(64, q.shape[1])
        k[valid] = keys.start[:, 0][index[valid]].float()
        scores, dp = q @ k.T, dout @ k[:, :512].T
        p = torch.where(valid, torch.exp2(scores * (softmax_scale * 1.4426950408889634) - lse[:, None]), 0.0)
        exchanged = p.to(dtype)
        dp = dp * (weight * softmax_scale)[:, None] - (delta * softmax_scale)[:, None]
        ds = (exchanged.float() * dp).to(dtype)
        total += ds.float() @ k
        for part, tile in ((state.DS, ds), (state.P, (p * weight[:, None]).to(dtype))):
            _put(piece.scores, tile, _score_row(piece, token, step, head_block, part), 0)
    total[lse == torch.inf] = 0.0
    for column in range(0, q.shape[1], 64):
        _put(dq, total[:, column : column + 64].to(dtype), token, head, column)


def key_gradients(program, rows, selection, piece, slots, topk, HAS_ROPE, BLOCKS):
    token, side = slots.first_token + program // 2, program % 2
    count = max(min(_num_selected(selection, token, topk) - slots.first_slot, slots.slots), 0)
    first = slots.first_slot // 64
    for tile in range(first, first + -(-count // 64)):
        result, rope = torch.zeros(64, 256), torch.zeros(64, 64)
        for block in range(BLOCKS):
            row = _score_row(piece, token, tile, 0, 0) + 128 * block
            ds, p = _box(piece.scores, row, 0).float(), _box(piece.scores, row + 64, 0).float()
            q, dout = (
                torch.cat([_box(x, token, 64 * block, side * 256 + column) for column in range(0, 256, 64)], 1).float()
                for x in (rows.q, rows.dout)
            )
            result += ds.T @ q + p.T @ dout
            if HAS_ROPE:
                rope += ds.T @ _box(rows.q, token, 64 * block, 512).float()
        slot = tile * 64 - slots.first_slot + torch.arange(64)
        index, valid = _indices(selection, token, tile * 64, slots.first_slot + count)
        target = index if slots.add else (token - slots.first_token) * slots.slots + slot
        for row in torch.arange(64)[valid].tolist():
            _send(slots, target[row], side * 256, result[row])
            if HAS_ROPE and (tile >> 1) & 1 == side:
                _send(slots, target[row], 512, rope[row])


def _send(slots, row, column, values):
    target = slots.target.view(-1)[row * slots.stride + column :][: len(values)]
    target.copy_(target + values if slots.add else values)


def _score_row(piece, token, tile, head_block, part):
    return int(state.score_row.fn(piece, token - piece.first_token, tile, head_block, part))


def _num_selected(selection, token, topk):
    if selection.topk_length is None:
        return topk
    return min(max(int(selection.topk_length.as_strided((), (), token * selection.length_stride)), 0), topk)


def _indices(selection, token, first, end):
    """The 64 indices from slot ``first`` on, and which are valid."""
    slot = first + torch.arange(64)
    count = min(max(end - first, 0), 64)
    offset = selection.indices.storage_offset() + token * selection.indices_stride + first
    index = torch.full((64,), -1)
    index[:count] = selection.indices.as_strided((count,), (1,), offset if count else 0).long()
    return index, (slot < end) & (index >= 0) & (index < selection.s_kv)


def _tensor(descriptor):
    return descriptor.base.as_strided(descriptor.shape, descriptor.strides, descriptor.base.storage_offset())


def _region(descriptor, origin):
    shape, box = descriptor.shape, descriptor.block_shape
    return tuple(slice(at, min(at + length, size)) for at, length, size in zip(origin, box, shape, strict=True))


def _box(descriptor, *origin):
    """A box of a TMA descriptor as a matrix, with zeros outside of the tensor."""
    part = _tensor(descriptor)[_region(descriptor, origin)]
    box = torch.zeros(*descriptor.block_shape, dtype=part.dtype)
    box[tuple(slice(size) for size in part.shape)] = part
    return box.flatten(0, -2)


def _put(descriptor, tile, *origin):
    part = _tensor(descriptor)[_region(descriptor, origin)]
    part.copy_(tile.view(*descriptor.block_shape)[tuple(slice(size) for size in part.shape)])


def row_sums(params, d_sink):
    """``ops.sparse_attention.row_sums`` in PyTorch."""
    delta = (params.out.float() * params.dout.float()).sum(-1)
    empty = params.lse == -torch.inf
    lse = params.lse.masked_fill(empty, 0.0)
    sink = torch.full_like(d_sink, -torch.inf) if params.attn_sink is None else params.attn_sink
    weight = torch.sigmoid(lse - sink)
    d_sink.copy_((-torch.sigmoid(sink - lse) * delta).masked_fill(empty, 0.0).sum(0))
    delta = weight * delta
    if params.dlse is not None:
        delta = delta - params.dlse
    rows = [lse.masked_fill(empty, torch.inf) * 1.4426950408889634]
    rows += [weight.masked_fill(empty, 0.0), delta.masked_fill(empty, 0.0)]
    return torch.stack([*rows, torch.zeros_like(delta)]).flatten(1)


class KeySums:
    """``kernels.triton.key_sums.KeySums`` in PyTorch."""

    def __init__(self, indices, lengths, total):
        self.indices, self.lengths, self.total = indices, lengths, total

    def add(self, contributions, first_token, tokens, first_slot, slots):
        launched = slice(first_token, first_token + tokens)
        indices = self.indices[launched, 0, first_slot : first_slot + slots]
        valid = (indices >= 0) & (indices < self.total.shape[0])
        if self.lengths is not None:
            valid &= first_slot + torch.arange(slots) < self.lengths[launched, None]
        rows = contributions[: tokens * slots].view(tokens, slots, -1)
        self.total.index_add_(0, indices[valid].long(), rows[valid])
