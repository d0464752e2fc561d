"""Sparse prefill in Triton: a program gathers the selected rows for one query token and a block of its heads.

This is the portable implementation. The Hopper implementation uses it to recompute tiles of several tokens that it
cannot process.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.config import SELECTED_ROWS, AttentionConfig, StepConfig, choose
from flashlatte.kernels.triton.fp8 import from_float32
from flashlatte.kernels.triton.online_softmax import (
    LN_2,
    LOG2_E,
    attend,
    empty_state,
    gpu_class,
    load_keys,
    load_query,
    no_prefetch,
    normalize,
    sink_weight,
    within,
)
from flashlatte.kernels.triton.rows import (
    HeadRows,
    QueryRopeRows,
    TokenRows,
    head_row,
    head_rows,
    query_and_rope,
    token_rows,
)
from flashlatte.kernels.triton.selections import TokenSelections, first_index, selected_count, selections_of
from flashlatte.ops.sparse_prefill.reference import SparsePrefillParams
from flashlatte.runtime.kernel_records import ElementPointer, Float32, Int64
from flashlatte.runtime.strides import first_stride
from flashlatte.runtime.triton_kernel import kernel


class TokenStatistics(NamedTuple):
    """max_logits and lse [s_q, h_q], contiguous, and the sinks that scale the output; None: no sinks."""

    max_logits: ElementPointer
    lse: ElementPointer
    empty_lse: Float32
    attn_sink: ElementPointer
    sink_stride: Int64


class TokenKeys(NamedTuple):
    """The selected rows of a query token: ``indices`` is its first index."""

    kv: TokenRows
    s_kv: Any
    indices: Any


@triton.jit
def _load_rows(keys, ahead, start, stop, dtype: tl.constexpr, config: tl.constexpr, step: tl.constexpr):
    """LOAD of ``attend``."""
    in_tile = tl.arange(0, step.block_n)
    index = tl.load(keys.indices + tl.minimum(start + in_tile, stop - 1))
    valid = within(index, keys.s_kv) & (in_tile < stop - start)
    return load_keys(keys.kv, index, valid, step), valid[None, :], ahead


@kernel
def sparse_prefill_kernel(
    q: HeadRows,
    q_rope: QueryRopeRows,
    kv: TokenRows,
    selections: TokenSelections,
    out: HeadRows,
    statistics: TokenStatistics,
    h_q: tl.int32,
    softmax_scale: tl.float32,
    damaged,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A program processes a query token and a block of its heads; if ``damaged`` is given, only tokens i with damaged[i
    // GROUP].

    The programs of a token's head blocks have adjacent indices, so all but the first hit the L2 cache.
    """
    head_blocks = tl.cdiv(h_q, STEP.block_h)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    if damaged is not None:
        is_damaged = tl.load(damaged + token // GROUP)
        if is_damaged == 0:
            return
    head = (tl.program_id(0) % head_blocks) * STEP.block_h + tl.arange(0, STEP.block_h)
    in_heads = head < h_q
    q_offset = (token * q.token_stride + head * q.head_stride) * q.align
    q_tile = load_query(q.start, q_offset, q_rope, 0, token, head, in_heads, STEP)
    length = selected_count(selections, token, selections.topk)
    scale = softmax_scale * LOG2_E

    keys = TokenKeys(kv, selections.s_kv, first_index(selections, token))
    state = attend(empty_state(STEP), q_tile, keys, 0, length, scale, no_prefetch, _load_rows, None, STEP)
    values, lse2 = normalize(state, scale, STEP)

    sink = statistics.attn_sink
    if sink is not None:
        weight = sink_weight(sink, statistics.sink_stride, head, in_heads, lse2, lse2 == float("-inf"))
        values *= weight[:, None]
    cols = tl.arange(0, STEP.latent)
    tl.store(
        head_row(out, token, head)[:, None] + cols[None, :],
        from_float32(values, out.start.dtype.element_ty),
        mask=in_heads[:, None] & (cols < STEP.latent_dim)[None, :],
    )
    row = token * h_q + head
    tl.store(statistics.max_logits + row, state.row_max * softmax_scale, mask=in_heads)
    tl.store(statistics.lse + row, tl.where(lse2 == float("-inf"), statistics.empty_lse, lse2 * LN_2), mask=in_heads)


def sparse_prefill(params: SparsePrefillParams, damaged: torch.Tensor | None = None, group: int = 1) -> None:
    """``damaged``, int32: tokens i with damaged[i // group] = 0 are not written."""
    kv, out, attn_sink = params.kv, params.out, params.attn_sink
    s_q, h_q, d_v = out.shape
    config, step = _config(gpu_class(out.device), h_q, params.head_dim, d_v)
    q, q_rope = query_and_rope(params.q, params.q_rope, step.latent_dim, step.rope)
    sparse_prefill_kernel[(s_q * -(-h_q // config.block_h),)](
        head_rows(q),
        q_rope,
        token_rows(kv[:, 0]),
        selections_of(params.indices, params.topk_length, kv.shape[0]),
        head_rows(out),
        TokenStatistics(params.max_logits, params.lse, params.empty_lse, attn_sink, first_stride(attn_sink)),
        h_q=h_q,
        softmax_scale=params.softmax_scale,
        damaged=damaged,
        STEP=step,
        GROUP=group,
        num_warps=config.num_warps,
    )


@functools.lru_cache(maxsize=256)
def _config(gpu: str, h_q: int, head_dim: int, d_v: int) -> tuple[AttentionConfig, StepConfig]:
    return choose(SELECTED_ROWS, gpu, h_q, head_dim, d_v, in_place=True)
