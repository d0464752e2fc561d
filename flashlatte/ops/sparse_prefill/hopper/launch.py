"""The launcher: the number of tokens per tile, and everything else that a call computes on the host."""

from __future__ import annotations

import math

import torch

from flashlatte.kernels.hopper.mla_tiles import LATENT
from flashlatte.ops.sparse_prefill import by_token
from flashlatte.ops.sparse_prefill.hopper.fp8.launch import sparse_prefill_fp8
from flashlatte.ops.sparse_prefill.hopper.kernel import sparse_prefill_kernel
from flashlatte.ops.sparse_prefill.hopper.producer import SparsePrefillQueries
from flashlatte.ops.sparse_prefill.hopper.records import output_of, work_of
from flashlatte.ops.sparse_prefill.hopper.unions import MAX_POSITIONS, build_unions
from flashlatte.ops.sparse_prefill.reference import SparsePrefillParams
from flashlatte.runtime import checks, machine
from flashlatte.runtime.strides import strides_in_use

ROWS_PER_TILE = 64
# 16 bytes, the size of a copy from global memory, in two-byte elements.
ALIGNMENT = 8
# Maximum bytes of the groups' entry lists.
SCRATCH_BYTES = 60 * 2**20
# The time of the union kernel grows with the number of positions. With random selections, groups of 4 are 10% faster at
# 64 positions per index, and groups of 2 are 1% slower at 16 (docs/notes/sparse-prefill.md).
POSITIONS_PER_INDEX = {1: 0, 2: 16, 4: 64}
MIN_TOPK = 512
MAX_ROUNDS_RATIO = 1.1


def sparse_prefill(params: SparsePrefillParams) -> None:
    if params.q_rope is not None and not _reads_parts(params, params.q_rope):
        params = params.with_joined_queries()
    q, kv, indices = params.q, params.kv, params.indices
    checks.begins_aligned(q=q, kv=kv, out=params.out)
    if params.precision is not None:
        sparse_prefill_fp8(params)
        return
    s_q, heads, _ = q.shape
    topk = indices.shape[-1]
    group = queries_per_tile(s_q, heads, topk, kv.shape[0], machine.num_sms(q.device))
    if group == 1:
        _launch(params, indices, params.topk_length)
        return
    chunk = max(SCRATCH_BYTES // (4 * topk) // group * group, group)
    for begin in range(0, s_q, chunk):
        part = params.of_tokens(slice(begin, begin + chunk))
        union = build_unions(part.indices, part.topk_length, kv.shape[0], group)
        _launch(part, union.entries, union.counts, union.damaged, group)
        by_token.sparse_prefill(part, union.damaged, group)


def _reads_parts(params: SparsePrefillParams, q_rope: torch.Tensor) -> bool:
    """Whether the kernel can copy the two parts of the queries."""
    return (
        params.precision is None
        and params.q.shape[2] == LATENT.value
        and checks.rows_aligned(params.q)
        and checks.rows_aligned(q_rope)
        and all(stride // ALIGNMENT < 2**31 for stride in strides_in_use(q_rope))
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
    params: SparsePrefillParams,
    lists: torch.Tensor,
    lengths: torch.Tensor | None,
    damaged: torch.Tensor | None = None,
    group: int = 1,
) -> None:
    """``lists``: the indices [s_q, 1, topk], or with group > 1 the entries of each group's union."""
    q, q_rope, kv = params.q, params.q_rope, params.kv
    s_q, heads, _ = q.shape
    rope_strides = () if q_rope is None else (stride // ALIGNMENT for stride in strides_in_use(q_rope))
    heads_per_tile = ROWS_PER_TILE // group
    head_blocks = -(-heads // heads_per_tile)
    tiles = -(-s_q // group) * head_blocks
    sparse_prefill_kernel[(min(tiles, machine.num_sms(q.device)),)](
        output_of(params, group, heads_per_tile, damaged),
        SparsePrefillQueries(q, q.stride(0) // ALIGNMENT, q.stride(1) // ALIGNMENT, heads, q_rope, *rope_strides),
        work_of(params, lists, lengths, head_blocks, tiles),
        kv=kv,
        kv_stride=kv.stride(0) // ALIGNMENT,
        scale_log2=params.softmax_scale * math.log2(math.e),
        HEAD_DIM=params.head_dim,
        GROUP=group,
        num_warps=4,
    )
