"""The launcher: everything a call computes on the host, from shapes and strides alone."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashlatte.kernels.hopper.two_consumers import CHUNK, ROWS, TILE
from flashlatte.kernels.triton.rows import BlockTable, Window
from flashlatte.ops.paged_attention.hopper.epilogue import PagedPrefillResults
from flashlatte.ops.paged_attention.hopper.kernel import paged_prefill_kernel
from flashlatte.ops.paged_attention.hopper.producer import PagedPrefillInputs
from flashlatte.ops.paged_attention.hopper.schedule import PagedPrefillWork
from flashlatte.ops.paged_attention.hopper.tiles import KEYS, PagedPrefillConfig
from flashlatte.ops.paged_attention.reference import PagedAttentionParams, paged_requests
from flashlatte.runtime import machine
from flashlatte.runtime.strides import first_stride, row_align, strides_in_use
from flashlatte.runtime.tma_descriptors import describe_rows

_LOG2_E = math.log2(math.e)
# Larger than any request, and small enough that sums of positions and windows fit 32 bits.
_MAX_WINDOW = 2**30 - 1


def attend_long(params: PagedAttentionParams, min_queries: int) -> None:
    """Compute attention for the requests of at least ``min_queries`` queries, and zero the output of tokens that belong
    to no request."""
    q, k_cache, v_cache, out, lse = params.q, params.k_cache, params.v_cache, params.out, params.lse
    tokens, heads, head_dim = q.shape
    num_pages, page_size, h_kv = k_cache.shape[:3]
    head_dim_v, device = v_cache.shape[3], q.device
    requests = paged_requests(params)
    pack = heads_per_tile(heads // h_kv)
    box = math.gcd(page_size, KEYS.value)
    align = row_align(out)
    config = PagedPrefillConfig(
        pack=pack,
        chunks=-(-head_dim // CHUNK.value),
        v_chunks=-(-head_dim_v // CHUNK.value),
        head_dim_v=head_dim_v,
        page_size=page_size,
        box=box,
        align=align,
        keys=KEYS.value,
    )
    max_tiles = (tokens * pack // TILE.value + requests.count + 2) * (heads // pack)
    out_strides = strides_in_use(out)
    sink = params.attn_sink
    inputs = PagedPrefillInputs(
        q=_packed(q, pack),
        k=_paged("k_cache", k_cache.squeeze(3), box),
        v=_paged("v_cache", v_cache, box),
        table=BlockTable(params.block_table, params.block_table.stride(0), num_pages),
        boxes=KEYS.value // box,
    )
    work = PagedPrefillWork(
        requests=requests,
        window=Window(min(params.window_left, _MAX_WINDOW), min(params.window_right, _MAX_WINDOW)),
        min_queries=min_queries,
        packs=heads // pack,
        packs_per_kv_head=heads // h_kv // pack,
        tile_counter=torch.zeros(1, dtype=torch.int32, device=device),
    )
    results = PagedPrefillResults(
        out=out,
        out_stride_token=out_strides[0] // align,
        out_stride_head=out_strides[1] // align,
        lse=lse,
        lse_stride_token=lse.stride(0),
        lse_stride_head=lse.stride(1),
        sink=sink,
        sink_stride=first_stride(sink),
        empty_lse=params.empty_lse,
    )
    paged_prefill_kernel[(min(max_tiles, machine.num_sms(device)),)](
        inputs, work, results, scale_log2=params.softmax_scale * _LOG2_E, CONFIG=config, num_warps=4
    )


def heads_per_tile(heads: int) -> int:
    """Query heads of a kv head that are rows of one tile: the largest power of two that divides ``heads``, at most
    64."""
    return min(heads & -heads, ROWS.value)


def _packed(q: torch.Tensor, pack: int) -> Any:
    """TMA descriptor of q [tokens, heads, d] as [tokens, packs, pack, d]."""
    tokens, heads, head_dim = q.shape
    token, head = strides_in_use(q)
    shape, strides = (tokens, heads // pack, pack, head_dim), (token, head * pack, head)
    return describe_rows("q", q.data_ptr(), q.dtype, shape, strides, (ROWS.value // pack, 1, pack, CHUNK.value))


def _paged(name: str, cache: torch.Tensor, box: int) -> Any:
    """TMA descriptor of a cache [pages, page_size, h_kv, d]."""
    boxes = 1, box, 1, CHUNK.value
    return describe_rows(name, cache.data_ptr(), cache.dtype, tuple(cache.shape), strides_in_use(cache), boxes)
