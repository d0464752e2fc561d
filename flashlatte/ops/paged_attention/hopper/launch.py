"""From a problem to a launch: all that a call settles on the host, from shapes and strides alone."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from flashlatte.kernels.hopper.two_consumers import CHUNK, ROWS, TILE
from flashlatte.ops.paged_attention.arguments import PagedAttentionArgs
from flashlatte.ops.paged_attention.hopper.kernel import kernel
from flashlatte.ops.paged_attention.hopper.tiles import KEYS, Plan
from flashlatte.runtime import machine
from flashlatte.runtime.strides import row_align, strides_in_use
from flashlatte.runtime.tma_descriptors import Address, describe

_LOG2_E = math.log2(math.e)
# Wider than any request, and small enough for sums of positions and windows to fit 32 bits.
_WIDEST = 2**30 - 1


def attend_long(problem: PagedAttentionArgs, fewest: int) -> None:
    """Attend the requests of at least ``fewest`` queries, and give tokens of no request out 0."""
    q, k_cache, v_cache, out, lse = problem.q, problem.k_cache, problem.v_cache, problem.out, problem.lse
    tokens, heads, head_dim = q.shape
    num_pages, page_size, h_kv = k_cache.shape[:3]
    head_dim_v, device = v_cache.shape[3], q.device
    requests = problem.cu_seqlens_q.shape[0] - 1
    pack = heads_of_tile(heads // h_kv)
    box = math.gcd(page_size, KEYS.value)
    align = row_align(out)
    plan = Plan(
        pack=pack,
        chunks=-(-head_dim // CHUNK.value),
        v_chunks=-(-head_dim_v // CHUNK.value),
        head_dim_v=head_dim_v,
        page_size=page_size,
        box=box,
        align=align,
    )
    most_tiles = (tokens * pack // TILE.value + requests + 2) * (heads // pack)
    out_strides = strides_in_use(out)
    sink = problem.attn_sink
    kernel[(min(most_tiles, machine.num_sms(device)),)](
        q=_packed(q, pack),
        k=_paged(k_cache.squeeze(3), box),
        v=_paged(v_cache, box),
        block_table=problem.block_table,
        table_stride=problem.block_table.stride(0),
        num_pages=num_pages,
        boxes=KEYS.value // box,
        cu_q=problem.cu_seqlens_q,
        seqused_k=problem.seqused_k,
        seqused_stride=problem.seqused_k.stride(0),
        capacity=problem.cached_keys,
        requests=requests,
        tokens=tokens,
        fewest=fewest,
        window_left=min(problem.window_left, _WIDEST),
        window_right=min(problem.window_right, _WIDEST),
        packs=heads // pack,
        packs_each=heads // h_kv // pack,
        taken=torch.zeros(1, dtype=torch.int32, device=device),
        out=out,
        out_stride_token=out_strides[0] // align,
        out_stride_head=out_strides[1] // align,
        lse=lse,
        lse_stride_token=lse.stride(0),
        lse_stride_head=lse.stride(1),
        sink=sink,
        sink_stride=0 if sink is None else sink.stride(0),
        scale_log2=problem.softmax_scale * _LOG2_E,
        empty_lse=problem.empty_lse,
        PLAN=plan,
        num_warps=4,
    )


def heads_of_tile(heads: int) -> int:
    """Of the query heads of a key head, how many are rows of one tile: as many as a power of two divides them by."""
    return min(heads & -heads, ROWS.value)


def _packed(q: torch.Tensor, pack: int) -> Any:
    """TMA descriptor of q [tokens, heads, d] as [tokens, packs, pack, d]."""
    tokens, heads, head_dim = q.shape
    token, head = strides_in_use(q)
    shape, strides = (tokens, heads // pack, pack, head_dim), (token, head * pack, head)
    return _descriptor(q.data_ptr(), q.dtype, shape, strides, (ROWS.value // pack, 1, pack, CHUNK.value))


def _paged(cache: torch.Tensor, box: int) -> Any:
    """TMA descriptor of a cache [pages, page_size, h_kv, d]."""
    return _descriptor(
        cache.data_ptr(), cache.dtype, tuple(cache.shape), strides_in_use(cache), (1, box, 1, CHUNK.value)
    )


@functools.lru_cache(maxsize=1024)
def _descriptor(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> Any:
    return describe(Address(address, dtype), shape, strides, box)
