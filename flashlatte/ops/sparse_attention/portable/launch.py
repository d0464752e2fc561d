"""The launcher of the backward kernels."""

from __future__ import annotations

import functools

import torch

from flashlatte.kernels.triton.config import AttentionConfig, StepConfig, Table, choose
from flashlatte.kernels.triton.key_sums import KeySums, pieces
from flashlatte.kernels.triton.online_softmax import gpu_class
from flashlatte.kernels.triton.rows import HeadRows, TokenRows
from flashlatte.kernels.triton.selections import selections_of
from flashlatte.ops.sparse_attention.portable.kernels import SparseBackwardQueries, keys_kernel, queries_kernel
from flashlatte.ops.sparse_attention.reference import SparseAttentionBackwardParams, SparseAttentionGradients
from flashlatte.ops.sparse_attention.row_sums import row_sums
from flashlatte.runtime.strides import row_align

# Tiles of the kernels for each class of GPUs, by what fits registers and shared memory.
#
# A program holds block_n keys and their gradient in float32; a step loads block_h rows of q and dout. On "blackwell",
# 64 keys do not fit in tensor memory.
KEYS: Table = {
    "hopper": (AttentionConfig(16, 64, 8, 2, warpgroups=True), AttentionConfig(32, 64, 8, 2, warpgroups=True)),
    "blackwell": (AttentionConfig(16, 32, 8), AttentionConfig(32, 32, 8)),
    "ampere": (AttentionConfig(16, 32, 8), AttentionConfig(32, 32, 8)),
    "small": (AttentionConfig(16, 16, 4, 2),),
    "other": (AttentionConfig(16, 16, 4),),
    "interpreter": (AttentionConfig(16, 32, 1),),
}
# A program holds block_h rows of q and dout, and dq in float32; a step loads block_n keys.
QUERIES: Table = {
    "hopper": (
        AttentionConfig(16, 64, 8, 3),
        AttentionConfig(32, 64, 8, 3),
        AttentionConfig(64, 32, 8, 2, warpgroups=True),
    ),
    "blackwell": (AttentionConfig(16, 32, 4, 3), AttentionConfig(32, 32, 8, 3)),
    "ampere": (AttentionConfig(16, 32, 4, 3), AttentionConfig(32, 32, 8, 3)),
    "small": (AttentionConfig(16, 16, 4, 3),),
    "other": (AttentionConfig(16, 16, 4),),
    "interpreter": (AttentionConfig(16, 16, 1), AttentionConfig(32, 16, 1)),
}
# Maximum bytes of contributions to dkv in scratch, if their sum is deterministic.
SCRATCH_BYTES = 256 * 2**20


def backward(params: SparseAttentionBackwardParams, gradients: SparseAttentionGradients) -> None:
    q, kv, indices, topk_length = params.q, params.kv, params.indices, params.topk_length
    deterministic = params.deterministic
    s_q, h_q, head_dim = q.shape
    d_v, topk = params.out.shape[2], indices.shape[2]
    gpu = gpu_class(q.device)
    keys, keys_step, queries, queries_step = _compiled_for(gpu, h_q, head_dim, d_v)
    sums = row_sums(params, gradients.d_sink)

    align = min(row_align(q), row_align(kv))
    records = (
        HeadRows(q, q.stride(0) // align, q.stride(1) // align, align),
        SparseBackwardQueries(params.dout, sums, s_q * h_q, h_q),
        TokenRows(kv, kv.stride(0) // align, align),
        selections_of(indices, params.topk_length, kv.shape[0]),
    )
    queries_kernel[(s_q * -(-h_q // queries.block_h),)](
        *records,
        softmax_scale=params.softmax_scale,
        dq=gradients.dq,
        STEP=queries_step,
        num_warps=queries.num_warps,
    )

    dkv_sum = torch.zeros(kv.shape[0], head_dim, dtype=torch.float32, device=q.device)
    scratch_rows, contributions = None, dkv_sum
    if deterministic:
        scratch_rows = min(SCRATCH_BYTES // (4 * head_dim), s_q * topk)
        contributions = torch.empty(scratch_rows, head_dim, dtype=torch.float32, device=q.device)
    key_sums = KeySums(indices, topk_length, dkv_sum)
    for first_token, tokens, first_slot, slots in pieces(s_q, topk, keys.block_n, scratch_rows):
        keys_kernel[(tokens * -(-slots // keys.block_n),)](
            *records,
            first_token=first_token,
            first_slot=first_slot,
            slots=slots,
            softmax_scale=params.softmax_scale,
            dkv=contributions,
            ATOMIC=not deterministic,
            STEP=keys_step,
            num_warps=keys.num_warps,
        )
        if deterministic:
            key_sums.add(contributions, first_token, tokens, first_slot, slots)
    gradients.dkv.copy_(dkv_sum.unsqueeze(1))


@functools.lru_cache(maxsize=64)
def _compiled_for(
    gpu: str, h_q: int, head_dim: int, d_v: int
) -> tuple[AttentionConfig, StepConfig, AttentionConfig, StepConfig]:
    """The configuration and constants of the keys kernel, and of the queries kernel."""
    keys, keys_step = choose(KEYS, gpu, h_q, head_dim, d_v, in_place=True)
    queries, queries_step = choose(QUERIES, gpu, h_q, head_dim, d_v, in_place=True)
    return keys, keys_step, queries, queries_step
