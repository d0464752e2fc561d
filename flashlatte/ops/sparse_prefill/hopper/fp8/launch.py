"""The launcher: quantizes kv, and launches the kernel."""

from __future__ import annotations

import math

import torch

from flashlatte.ops.sparse_prefill.hopper.epilogue import SparsePrefillOutput
from flashlatte.ops.sparse_prefill.hopper.fp8.kernel import sparse_prefill_fp8_kernel
from flashlatte.ops.sparse_prefill.hopper.fp8.queries import WIDTH
from flashlatte.ops.sparse_prefill.hopper.fp8.state import Fp8QueryBuffers, Fp8Workspace
from flashlatte.ops.sparse_prefill.hopper.fp8.workspace import quantize_keys
from flashlatte.ops.sparse_prefill.hopper.producer import SparsePrefillQueries
from flashlatte.ops.sparse_prefill.hopper.state import SparsePrefillWork
from flashlatte.ops.sparse_prefill.reference import SparsePrefillParams
from flashlatte.runtime import machine
from flashlatte.runtime.strides import strides_in_use
from flashlatte.runtime.tma_descriptors import describe

ROWS_PER_TILE = 64
# 16 bytes in elements of q and in pairs of e4m3 values.
_ALIGNMENT = 8


def sparse_prefill_fp8(params: SparsePrefillParams) -> None:
    q, kv, out, attn_sink = params.q, params.kv, params.out, params.attn_sink
    indices, lengths = params.indices, params.topk_length
    s_q, heads, head_dim = q.shape
    head_blocks = -(-heads // ROWS_PER_TILE)
    tiles = s_q * head_blocks
    ctas = min(tiles, machine.num_sms(q.device))
    keys = quantize_keys(kv)
    pairs = keys.rows.view(torch.bfloat16)
    buffers = torch.empty(ctas, 2, ROWS_PER_TILE, WIDTH.value, dtype=torch.float8_e4m3fn, device=q.device)
    sparse_prefill_fp8_kernel[(ctas,)](
        SparsePrefillOutput(
            descriptor=describe(out, out.shape, strides_in_use(out), (1, ROWS_PER_TILE, 256)),
            max_logits=params.max_logits,
            lse=params.lse,
            sinks=attn_sink,
            sink_stride=0 if attn_sink is None else attn_sink.stride(0),
            heads=heads,
            softmax_scale=params.softmax_scale,
            empty_lse=params.empty_lse,
            damaged=None,
        ),
        SparsePrefillQueries(q, q.stride(0) // _ALIGNMENT, q.stride(1) // _ALIGNMENT, heads),
        SparsePrefillWork(
            indices=indices,
            index_stride=indices.stride(0),
            lengths=lengths,
            length_stride=0 if lengths is None else lengths.stride(0),
            s_kv=kv.shape[0],
            topk=indices.shape[-1],
            head_blocks=head_blocks,
            tiles=tiles,
            tokens=s_q,
        ),
        Fp8Workspace(pairs, pairs.stride(0) // _ALIGNMENT, keys.scale),
        Fp8QueryBuffers(buffers, buffers.view(torch.bfloat16)),
        scale_log2=params.softmax_scale * math.log2(math.e),
        HAS_ROPE=head_dim == 576,
        num_warps=4,
    )
