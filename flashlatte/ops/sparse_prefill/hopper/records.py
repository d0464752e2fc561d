"""Arguments that the bf16 and e4m3 kernels have in common."""

from __future__ import annotations

import torch

from flashlatte.kernels.triton.selections import selections_of
from flashlatte.ops.sparse_prefill.hopper.epilogue import SparsePrefillOutput
from flashlatte.ops.sparse_prefill.hopper.state import SparsePrefillWork
from flashlatte.ops.sparse_prefill.reference import SparsePrefillParams
from flashlatte.runtime.strides import first_stride, strides_in_use
from flashlatte.runtime.tma_descriptors import describe


def output_of(
    params: SparsePrefillParams, group: int, heads_per_tile: int, damaged: torch.Tensor | None = None
) -> SparsePrefillOutput:
    """The output record for tiles of ``group`` tokens and ``heads_per_tile`` heads."""
    out, attn_sink = params.out, params.attn_sink
    return SparsePrefillOutput(
        descriptor=describe(out, out.shape, strides_in_use(out), (group, heads_per_tile, 256)),
        max_logits=params.max_logits,
        lse=params.lse,
        sinks=attn_sink,
        sink_stride=first_stride(attn_sink),
        heads=params.q.shape[1],
        softmax_scale=params.softmax_scale,
        empty_lse=params.empty_lse,
        damaged=damaged,
    )


def work_of(
    params: SparsePrefillParams, lists: torch.Tensor, lengths: torch.Tensor | None, head_blocks: int, tiles: int
) -> SparsePrefillWork:
    """The work record of ``tiles`` tiles. ``lists``: indices, or entries of unions, [s_q, 1, topk]; ``lengths``:
    [s_q]."""
    return SparsePrefillWork(
        selections=selections_of(lists, lengths, params.kv.shape[0]),
        head_blocks=head_blocks,
        tiles=tiles,
        tokens=params.q.shape[0],
    )
