"""The launcher: the number of tokens per tile, and everything else that a call computes on the host."""

from __future__ import annotations

import math

import torch

from flashlatte.ops.sparse_prefill import by_token
from flashlatte.ops.sparse_prefill.hopper.kernel import sparse_prefill_kernel
from flashlatte.ops.sparse_prefill.hopper.unions import MAX_POSITIONS, build_unions
from flashlatte.runtime import checks, machine
from flashlatte.runtime.strides import strides_in_use
from flashlatte.runtime.tma_descriptors import describe

ROWS_PER_TILE = 64
# 16 bytes, the size of a copy from global memory, in two-byte elements.
ALIGNMENT = 8
# Maximum bytes of the groups' lists.
SCRATCH_BYTES = 60 * 2**20
# The time of the union kernel grows with the number of positions. With random selections, groups of 4 are 10% faster at
# 64 positions per index, and groups of 2 are 1% slower at 16 (docs/notes/sparse-prefill.md).
POSITIONS_PER_INDEX = {1: 0, 2: 16, 4: 64}
MIN_TOPK = 512
MAX_ROUNDS_RATIO = 1.1


def sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    softmax_scale: float,
    empty_lse: float,
    out: torch.Tensor,
    max_logits: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    checks.begins_aligned("hopper", q=q, kv=kv, out=out)
    s_q, heads, _ = q.shape
    topk = indices.shape[-1]
    group = queries_per_tile(s_q, heads, topk, kv.shape[0], machine.num_sms(q.device))
    numbers = (attn_sink, softmax_scale, empty_lse)
    if group == 1:
        _launch(q, kv, indices, topk_length, *numbers, out, max_logits, lse)
        return
    chunk = max(SCRATCH_BYTES // (4 * topk) // group * group, group)
    for begin in range(0, s_q, chunk):
        tokens = slice(begin, begin + chunk)
        chunk_indices, lengths = indices[tokens], None if topk_length is None else topk_length[tokens]
        results = (out[tokens], max_logits[tokens], lse[tokens])
        union = build_unions(chunk_indices, lengths, kv.shape[0], group)
        _launch(q[tokens], kv, union.entries, union.counts, *numbers, *results, damaged=union.damaged, group=group)
        by_token.sparse_prefill(
            q[tokens], kv, chunk_indices, lengths, *numbers, *results, damaged=union.damaged, group=group
        )


def queries_per_tile(s_q: int, heads: int, topk: int, s_kv: int, num_sms: int) -> int:
    """The number of adjacent query tokens that share a tile: as many as fill it, if that is not slower even for
    different selections.

    In the worst case a group takes as long as its tokens one after the other, and groups must fill the SMs as well as
    single tokens do.
    """
    group = 1 if heads > ROWS_PER_TILE // 2 else 2 if heads > ROWS_PER_TILE // 4 else 4
    rounds = -(-s_q // num_sms)
    rounds_of_groups = -(-s_q // (group * num_sms))
    fills_sms = group * rounds_of_groups <= MAX_ROUNDS_RATIO * rounds
    union_is_fast = topk >= MIN_TOPK and s_kv <= min(POSITIONS_PER_INDEX[group] * topk, MAX_POSITIONS)
    return group if fills_sms and union_is_fast else 1


def _launch(
    q: torch.Tensor,
    kv: torch.Tensor,
    lists: torch.Tensor,
    lengths: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    softmax_scale: float,
    empty_lse: float,
    out: torch.Tensor,
    max_logits: torch.Tensor,
    lse: torch.Tensor,
    damaged: torch.Tensor | None = None,
    group: int = 1,
) -> None:
    """``lists``: the indices [s_q, 1, topk], or with group > 1 the entries of each group's union."""
    s_q, heads, head_dim = q.shape
    heads_per_tile = ROWS_PER_TILE // group
    head_blocks = -(-heads // heads_per_tile)
    tiles = -(-s_q // group) * head_blocks
    sparse_prefill_kernel[(min(tiles, machine.num_sms(q.device)),)](
        out_desc=describe(out, out.shape, strides_in_use(out), (group, heads_per_tile, 256)),
        q=q,
        q_token_stride=q.stride(0) // ALIGNMENT,
        q_head_stride=q.stride(1) // ALIGNMENT,
        kv=kv,
        kv_stride=kv.stride(0) // ALIGNMENT,
        indices=lists,
        index_stride=lists.stride(0),
        lengths=lengths,
        length_stride=0 if lengths is None else lengths.stride(0),
        sinks=attn_sink,
        sink_stride=0 if attn_sink is None else attn_sink.stride(0),
        max_logits=max_logits,
        lse=lse,
        damaged=damaged,
        s_kv=kv.shape[0],
        heads=heads,
        head_blocks=head_blocks,
        topk=lists.shape[-1],
        tiles=tiles,
        tokens=s_q,
        softmax_scale=softmax_scale,
        scale_log2=softmax_scale * math.log2(math.e),
        empty_lse=empty_lse,
        HEAD_DIM=head_dim,
        GROUP=group,
        num_warps=4,
    )
