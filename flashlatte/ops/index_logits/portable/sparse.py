"""Index logits of candidate blocks: a program holds one query and goes over some tiles of its columns.

Contiguous keys are read as a cache of one page, whose size is their number.
"""

from __future__ import annotations

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_address import load_words
from flashlatte.kernels.triton.cache_layout import as_bytes, cdiv, row_alignment
from flashlatte.kernels.triton.fp8 import converts_e4m3, from_float32
from flashlatte.kv_cache.index_formats import as_index_cache
from flashlatte.ops.index_logits.portable.config import RAGGED, choose, padded_heads
from flashlatte.ops.index_logits.portable.ragged import ENCODINGS
from flashlatte.ops.index_logits.portable.score import compute_type, head_sums, load_keys, load_queries
from flashlatte.runtime import machine
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel


def sparse(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    first_key: torch.Tensor,
    num_keys: torch.Tensor,
    block_size: int,
    logits: torch.Tensor,
) -> None:
    num_rows, heads, head_dim = q.shape
    if k.dim() == 4:
        cache, layout = as_index_cache(k, head_dim)
        k = as_bytes(cache)
        num_pages, page_size = k.shape[:2]
        encoding, key_stride, scale_stride = layout.encoding, layout.planes[0].width, layout.scale_bytes
        unit, page_stride = row_alignment(k, 0), stride_in_use(k, 0)
    else:
        encoding, num_pages, page_size = ENCODINGS[k.dtype], 1, k.shape[0]
        unit, page_stride, key_stride = row_alignment(k, 0), 0, stride_in_use(k, 0)
        scale_stride = 0 if k_scale is None else stride_in_use(k_scale, 0)
        k = as_bytes(k)
    config = choose(RAGGED, q.device)
    width = logits.shape[1]
    tiles = cdiv(width, config.block_n * config.tiles)
    q_unit = row_alignment(q, 0, 1)
    sparse_kernel[(num_rows * tiles,)](
        q=as_bytes(q),
        k=k,
        k_scale=k_scale,
        weights=weights,
        first_key=first_key,
        num_keys=num_keys,
        logits=logits,
        heads=heads,
        width=width,
        block_size=block_size,
        tiles=tiles,
        num_pages=num_pages,
        page_size=page_size,
        page_stride=page_stride // unit,
        key_stride=key_stride // unit,
        scale_stride=scale_stride,
        q_stride=stride_in_use(q, 0) // q_unit,
        q_head_stride=stride_in_use(q, 1) // q_unit,
        weight_stride=stride_in_use(weights, 0),
        first_stride=first_key.stride(0),
        first_block_stride=first_key.stride(1),
        num_stride=num_keys.stride(0),
        num_block_stride=num_keys.stride(1),
        logits_stride=stride_in_use(logits, 0),
        D=head_dim,
        ENCODING=encoding,
        COMPUTE=compute_type(q, encoding),
        Q_ALIGN=q_unit,
        ALIGN=unit,
        NATIVE=converts_e4m3(q.device),
        INTERPRETED=machine.interpreting(),
        BLOCK_H=padded_heads(heads),
        BLOCK_N=config.block_n,
        TILES=config.tiles,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@kernel(by_element=("first_key", "num_keys"))
def sparse_kernel(
    q,
    k,
    k_scale,
    weights,
    first_key,
    num_keys,
    logits,
    heads: tl.int32,
    width: tl.int64,
    block_size: tl.int32,
    tiles: tl.int32,
    num_pages: tl.int64,
    page_size: tl.int64,
    page_stride: tl.int64,
    key_stride: tl.int64,
    scale_stride: tl.int64,
    q_stride: tl.int64,
    q_head_stride: tl.int64,
    weight_stride: tl.int64,
    first_stride: tl.int64,
    first_block_stride: tl.int64,
    num_stride: tl.int64,
    num_block_stride: tl.int64,
    logits_stride: tl.int64,
    D: tl.constexpr,
    ENCODING: tl.constexpr,
    COMPUTE: tl.constexpr,
    Q_ALIGN: tl.constexpr,
    ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0) // tiles
    begin = (tl.program_id(0) % tiles).to(tl.int64) * (BLOCK_N * TILES)
    head = tl.arange(0, BLOCK_H)
    queries, half_weights = load_queries(
        q,
        weights,
        tl.zeros([BLOCK_H], tl.int32) + row,
        head,
        head < heads,
        q_stride,
        q_head_stride,
        weight_stride,
        D,
        ENCODING,
        COMPUTE,
        NATIVE,
        Q_ALIGN,
    )
    first_row = first_key + row.to(tl.int64) * first_stride
    num_row = num_keys + row.to(tl.int64) * num_stride
    logits_row = logits + row.to(tl.int64) * logits_stride
    for tile in range(begin, tl.minimum(begin + BLOCK_N * TILES, width), BLOCK_N):
        # [BLOCK_N]
        column = tile + tl.arange(0, BLOCK_N)
        in_row = column < width
        block, offset = column // block_size, column % block_size
        first = tl.load(first_row + block * first_block_stride, mask=in_row, other=0).to(tl.int64)
        seen = tl.load(num_row + block * num_block_stride, mask=in_row, other=0).to(tl.int64)
        key = first + offset
        visible = (offset < seen) & (key >= 0) & (key < num_pages * page_size)
        key = tl.where(visible, key, 0)
        page = k + key // page_size * page_stride * ALIGN
        slot = key % page_size
        scales = k_scale
        if ENCODING == "e2m1" or ENCODING == "e4m3":
            if k_scale is None:
                scales = page + page_size * key_stride * ALIGN + slot * scale_stride
            else:
                scales = k_scale + slot * scale_stride
        if ENCODING == "e4m3":  # before the product, behind which it is waited for
            if k_scale is None:
                scale = load_words(scales, 0, tl.uint32, visible, ALIGN).to(tl.float32, bitcast=True)
            else:
                scale = tl.load(scales, mask=visible, other=0.0)
        keys = load_keys(page + slot * key_stride * ALIGN, scales, visible, D, ENCODING, COMPUTE, NATIVE)
        # [BLOCK_N, 1]
        scores = head_sums(keys, queries, half_weights, 1, ENCODING, COMPUTE)
        if ENCODING == "e4m3":
            scores *= scale[:, None]
        scores = tl.where(visible[:, None], scores, float("-inf"))
        tl.store(
            logits_row + column[:, None],
            from_float32(scores, logits.dtype.element_ty, INTERPRETED),
            mask=in_row[:, None],
        )
