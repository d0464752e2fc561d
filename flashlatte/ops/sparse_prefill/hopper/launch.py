"""Host code: the descriptor, grid and flags."""

from __future__ import annotations

import math

import torch

from flashlatte.ops.sparse_prefill.hopper.kernel import sparse_prefill_kernel
from flashlatte.runtime import machine
from flashlatte.runtime.strides import strides_in_use
from flashlatte.runtime.tma_descriptors import describe

HEADS_PER_TILE = 64
# 16 bytes of a two-byte type: what copies from global memory move at a time.
ALIGNMENT = 8


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
    for name, rows in (("q", q), ("kv", kv), ("out", out)):
        if rows.data_ptr() % 16:
            raise ValueError(
                f"{name} must begin at a multiple of 16 bytes for backend='hopper', got {rows.data_ptr():#x}"
            )
    s_q, heads, head_dim = q.shape
    head_blocks = -(-heads // HEADS_PER_TILE)
    tiles = s_q * head_blocks
    sparse_prefill_kernel[(min(tiles, machine.num_sms(q.device)),)](
        out_desc=describe(out, out.shape, strides_in_use(out), (1, HEADS_PER_TILE, 256)),
        q=q,
        q_token_stride=q.stride(0) // ALIGNMENT,
        q_head_stride=q.stride(1) // ALIGNMENT,
        kv=kv,
        kv_stride=kv.stride(0) // ALIGNMENT,
        indices=indices,
        index_stride=indices.stride(0),
        lengths=topk_length,
        length_stride=0 if topk_length is None else topk_length.stride(0),
        sinks=attn_sink,
        sink_stride=0 if attn_sink is None else attn_sink.stride(0),
        max_logits=max_logits,
        lse=lse,
        s_kv=kv.shape[0],
        heads=heads,
        head_blocks=head_blocks,
        topk=indices.shape[-1],
        tiles=tiles,
        softmax_scale=softmax_scale,
        scale_log2=softmax_scale * math.log2(math.e),
        empty_lse=empty_lse,
        HEAD_DIM=head_dim,
        num_warps=4,
        enable_fp_fusion=True,
    )
