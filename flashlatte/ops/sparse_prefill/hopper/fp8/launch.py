"""The launcher: quantizes kv, and launches the kernel."""

from __future__ import annotations

import math

import torch

from flashlatte.ops.sparse_prefill.hopper.fp8.kernel import sparse_prefill_fp8_kernel
from flashlatte.ops.sparse_prefill.hopper.fp8.queries import WIDTH
from flashlatte.ops.sparse_prefill.hopper.fp8.state import Fp8QueryBuffers, Fp8Workspace
from flashlatte.ops.sparse_prefill.hopper.fp8.workspace import quantize_keys
from flashlatte.ops.sparse_prefill.hopper.producer import SparsePrefillQueries
from flashlatte.ops.sparse_prefill.hopper.records import output_of, work_of
from flashlatte.ops.sparse_prefill.reference import SparsePrefillParams
from flashlatte.runtime import machine

ROWS_PER_TILE = 64
# 16 bytes in elements of q and in pairs of e4m3 values.
_ALIGNMENT = 8


def sparse_prefill_fp8(params: SparsePrefillParams) -> None:
    q = params.q
    s_q, heads, head_dim = q.shape
    head_blocks = -(-heads // ROWS_PER_TILE)
    tiles = s_q * head_blocks
    ctas = min(tiles, machine.num_sms(q.device))
    keys = quantize_keys(params.kv)
    pairs = keys.rows.view(torch.bfloat16)
    buffers = torch.empty(ctas, 2, ROWS_PER_TILE, WIDTH.value, dtype=torch.float8_e4m3fn, device=q.device)
    sparse_prefill_fp8_kernel[(ctas,)](
        output_of(params, 1, ROWS_PER_TILE),
        SparsePrefillQueries(q, q.stride(0) // _ALIGNMENT, q.stride(1) // _ALIGNMENT, heads),
        work_of(params, params.indices, params.topk_length, head_blocks, tiles),
        Fp8Workspace(pairs, pairs.stride(0) // _ALIGNMENT, keys.scale),
        Fp8QueryBuffers(buffers, buffers.view(torch.bfloat16)),
        scale_log2=params.softmax_scale * math.log2(math.e),
        HAS_ROPE=head_dim == 576,
        num_warps=4,
    )
