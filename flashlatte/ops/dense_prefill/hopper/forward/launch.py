"""The launcher: everything a call computes on the host, from shapes and strides alone."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false

from __future__ import annotations

import functools
import math

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashlatte.kernels.hopper.two_consumers import CHUNK, ROWS, TILE
from flashlatte.kernels.triton.rows import Window
from flashlatte.ops.dense_prefill.hopper.forward.epilogue import DensePrefillResults
from flashlatte.ops.dense_prefill.hopper.forward.kernel import dense_prefill_forward_kernel
from flashlatte.ops.dense_prefill.hopper.forward.producer import DensePrefillInputs
from flashlatte.ops.dense_prefill.hopper.forward.schedule import DensePrefillWork
from flashlatte.ops.dense_prefill.hopper.forward.tiles import (
    DensePrefillConfig,
    first_columns,
    keys_per_block,
    rest_of,
    second_columns,
)
from flashlatte.ops.dense_prefill.reference import DensePrefillParams, requests_of
from flashlatte.runtime import machine
from flashlatte.runtime.strides import row_align, strides_in_use
from flashlatte.runtime.tma_descriptors import describe_rows

_LOG2_E = math.log2(math.e)
# Bytes of keys and values that are in use at the same time: about half of the L2 cache.
_RESIDENT = 24 << 20
# Larger than any request, and small enough that sums of positions and windows fit 32 bits.
_MAX_WINDOW = 1 << 29


def forward(params: DensePrefillParams, out: torch.Tensor, lse: torch.Tensor) -> None:
    """``max_seqlen_k`` only determines how many heads are processed concurrently."""
    q, k, v = params.q, params.k, params.v
    tokens_q, heads, head_dim = q.shape
    tokens_k, heads_kv, head_dim_v = v.shape
    if not (tokens_q and heads):
        return
    if not tokens_k:
        out.zero_()
        lse.fill_(params.empty_lse)
        return
    device = q.device
    group_kv = heads // heads_kv
    keys = keys_per_block(head_dim, head_dim_v)
    config = DensePrefillConfig(head_dim, head_dim_v, row_align(out), keys)
    out_strides = strides_in_use(out)
    inputs = DensePrefillInputs(
        q=_descriptor_of("q", q, ROWS.value, CHUNK.value),
        q_rest=_rest_of("q", q, ROWS.value, rest_of(head_dim)),
        k=_descriptor_of("k", k, keys, CHUNK.value),
        k_rest=_rest_of("k", k, keys, rest_of(head_dim)),
        v=_descriptor_of("v", v, keys, first_columns(head_dim_v)),
        v_rest=_rest_of("v", v, keys, second_columns(head_dim_v)),
    )
    requests = requests_of(params)
    requests = requests._replace(
        cu_seqlens_q=requests.cu_seqlens_q.contiguous(), cu_seqlens_k=requests.cu_seqlens_k.contiguous()
    )
    work = DensePrefillWork(
        requests=requests,
        window=Window(
            *(max(min(side, _MAX_WINDOW), -_MAX_WINDOW) for side in (params.window_left, params.window_right))
        ),
        heads=heads,
        group=concurrent_heads(heads, group_kv, params.max_seqlen_k, head_dim + head_dim_v),
        group_kv=group_kv,
        tile_counter=torch.zeros(1, dtype=torch.int32, device=device),
    )
    results = DensePrefillResults(
        out=out,
        out_stride_token=out_strides[0] // config.align,
        out_stride_head=out_strides[1] // config.align,
        lse=lse,
        lse_stride_token=lse.stride(0),
        lse_stride_head=lse.stride(1),
        empty_lse=params.empty_lse,
    )
    max_tiles = (-(-tokens_q // TILE.value) + requests.count + 2) * heads
    dense_prefill_forward_kernel[(min(max_tiles, machine.num_sms(device)),)](
        inputs, work, results, scale_log2=params.softmax_scale * _LOG2_E, CONFIG=config, num_warps=4
    )


@functools.lru_cache(maxsize=1024)
def concurrent_heads(heads: int, group_kv: int, max_seqlen_k: int, elements: int) -> int:
    """Query heads whose keys and values fit in the L2 cache together: a divisor of ``heads``, in whole groups of a kv
    head.

    ``elements``: elements of a key plus its value.
    """
    bytes_of_head = max(max_seqlen_k, 1) * elements * 2
    kv_heads = heads // group_kv
    fitting = max(min(_RESIDENT // bytes_of_head, kv_heads), 1)
    return group_kv * max(n for n in range(1, fitting + 1) if kv_heads % n == 0)


def _descriptor_of(name: str, x: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    """Descriptor of x [tokens, heads, d], for boxes of ``rows`` and ``cols`` of a head."""
    return describe_rows(name, x.data_ptr(), x.dtype, tuple(x.shape), strides_in_use(x), (rows, 1, cols))


def _rest_of(name: str, x: torch.Tensor, rows: int, cols: int) -> TensorDescriptor | None:
    return _descriptor_of(name, x, rows, cols) if cols else None
