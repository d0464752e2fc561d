"""Index logits over contiguous keys: a program keeps a tile of queries and loops over tiles of keys."""

from __future__ import annotations

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import cdiv, row_alignment
from flashlatte.kernels.triton.fp8 import converts_e4m3, from_float32
from flashlatte.ops.index_logits.portable.config import RAGGED, choose, padded_heads
from flashlatte.ops.index_logits.portable.score import compute_type, head_sums, load_keys, load_queries
from flashlatte.runtime import machine
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

ENCODINGS = {torch.float8_e4m3fn: "e4m3", torch.bfloat16: "bf16", torch.float32: "fp32", torch.uint8: "e2m1"}


def ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    key_start: torch.Tensor,
    key_end: torch.Tensor,
    logits: torch.Tensor,
    clean: bool,
    compressed: bool,
) -> None:
    if clean:
        logits.fill_(-torch.inf)
    num_rows, heads, head_dim = q.shape
    encoding = ENCODINGS[k.dtype]
    config = choose(RAGGED, q.device)
    block_h = padded_heads(heads)
    block_q = max(config.rows // block_h, 1)
    q_blocks = cdiv(num_rows, block_q)
    key_blocks = cdiv(k.shape[0], config.block_n * config.tiles)
    q_unit, k_unit = row_alignment(q, 0, 1), row_alignment(k, 0)
    ragged_kernel[(q_blocks * key_blocks,)](
        q=q.view(torch.uint8) if q.dtype == torch.float8_e4m3fn else q,
        k=k.view(torch.uint8) if k.dtype == torch.float8_e4m3fn else k,
        k_scale=k_scale,
        weights=weights,
        key_start=key_start,
        key_end=key_end,
        logits=logits,
        num_rows=num_rows,
        num_keys=k.shape[0],
        heads=heads,
        width=logits.shape[1],
        q_blocks=q_blocks,
        q_stride=stride_in_use(q, 0) // q_unit,
        q_head_stride=stride_in_use(q, 1) // q_unit,
        k_stride=stride_in_use(k, 0) // k_unit,
        scale_stride=0 if k_scale is None else stride_in_use(k_scale, 0),
        weight_stride=stride_in_use(weights, 0),
        start_stride=key_start.stride(0),
        end_stride=key_end.stride(0),
        logits_stride=stride_in_use(logits, 0),
        D=head_dim,
        ENCODING=encoding,
        COMPUTE=compute_type(q, encoding),
        COMPRESSED=compressed,
        Q_ALIGN=q_unit,
        K_ALIGN=k_unit,
        NATIVE=converts_e4m3(q.device),
        INTERPRETED=machine.interpreting(),
        BLOCK_Q=block_q,
        BLOCK_H=block_h,
        BLOCK_N=config.block_n,
        TILES=config.tiles,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@kernel
def ragged_kernel(
    q,
    k,
    k_scale,
    weights,
    key_start,
    key_end,
    logits,
    num_rows: tl.int32,
    num_keys: tl.int64,
    heads: tl.int32,
    width: tl.int64,
    q_blocks: tl.int32,
    q_stride: tl.int64,
    q_head_stride: tl.int64,
    k_stride: tl.int64,
    scale_stride: tl.int64,
    weight_stride: tl.int64,
    start_stride: tl.int64,
    end_stride: tl.int64,
    logits_stride: tl.int64,
    D: tl.constexpr,
    ENCODING: tl.constexpr,
    COMPUTE: tl.constexpr,
    COMPRESSED: tl.constexpr,
    Q_ALIGN: tl.constexpr,
    K_ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
):
    first_query = (tl.program_id(0) % q_blocks) * BLOCK_Q
    first_key = (tl.program_id(0) // q_blocks).to(tl.int64) * (BLOCK_N * TILES)

    # [BLOCK_Q]
    query = first_query + tl.arange(0, BLOCK_Q)
    in_rows = query < num_rows
    start = tl.load(key_start + query.to(tl.int64) * start_stride, mask=in_rows, other=0).to(tl.int64)
    end = tl.load(key_end + query.to(tl.int64) * end_stride, mask=in_rows, other=0).to(tl.int64)
    start = tl.maximum(start, 0)
    end = tl.minimum(end, num_keys)
    if COMPRESSED:
        end = tl.minimum(end, start + width)
    # The range of tiles with keys of any of these queries.
    some = start < end
    lowest = tl.maximum(tl.min(tl.where(some, start, num_keys), axis=0), first_key)
    highest = tl.minimum(tl.max(tl.where(some, end, 0), axis=0), first_key + BLOCK_N * TILES)
    begin = lowest // BLOCK_N * BLOCK_N
    if begin < highest:
        # [BLOCK_Q · BLOCK_H]
        row = tl.arange(0, BLOCK_Q * BLOCK_H)
        row_query, head = first_query + row // BLOCK_H, row % BLOCK_H
        queries, half_weights = load_queries(
            q,
            weights,
            row_query,
            head,
            (row_query < num_rows) & (head < heads),
            q_stride,
            q_head_stride,
            weight_stride,
            D,
            ENCODING,
            COMPUTE,
            NATIVE,
            Q_ALIGN,
        )
        logits_row = logits + query.to(tl.int64) * logits_stride
        if COMPRESSED:
            logits_row -= start
        for tile in range(begin, highest, BLOCK_N):
            key = tile + tl.arange(0, BLOCK_N)
            in_keys = key < num_keys
            scales = k_scale
            if ENCODING == "e2m1":
                scales = k_scale + key * scale_stride
            if ENCODING == "e4m3":  # before the MMA, so that its latency is hidden
                scale = tl.load(k_scale + key * scale_stride, mask=in_keys, other=0.0)
            keys = load_keys(k + key * k_stride * K_ALIGN, scales, in_keys, D, ENCODING, COMPUTE, NATIVE)
            # [BLOCK_N, BLOCK_Q]
            scores = head_sums(keys, queries, half_weights, BLOCK_Q, ENCODING, COMPUTE)
            if ENCODING == "e4m3":
                scores *= scale[:, None]
            visible = (key[:, None] >= start[None, :]) & (key[:, None] < end[None, :])
            value = from_float32(scores, logits.dtype.element_ty, INTERPRETED)
            tl.store(logits_row[None, :] + key[:, None], value, mask=visible)
