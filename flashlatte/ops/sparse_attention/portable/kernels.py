"""Gradients of sparse attention: one kernel for tiles of a token's selected keys, one for blocks of its heads.

With P the probabilities over the selected keys and w = e^lse / (e^lse + e^sink), or 1 without a sink:
dP = dO Vᵀ, dS = scale · P (w dP - (w Σ out · dO - dlse)), dQ = dS K, dK = dSᵀ Q, dV = w Pᵀ dO. Both kernels recompute P
from lse, because a fused kernel with dQ and dKV in registers would spill.

STEP is a ``kernels.triton.config.StepConfig``. out, lse, their gradients and dq are contiguous.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import from_float32
from flashlatte.kernels.triton.online_softmax import LOG2_E, load_keys, load_rows, load_tile, within
from flashlatte.kernels.triton.rows import HeadRows, TokenRows
from flashlatte.kernels.triton.selections import TokenSelections, first_index, selected_count
from flashlatte.runtime.kernel_records import Int32, Int64, Pointer
from flashlatte.runtime.triton_kernel import kernel


class SparseBackwardQueries(NamedTuple):
    """Contiguous dout [s_q, h_q, d_v], and sums [4, rows] of ``row_sums_kernel``, rows = s_q · h_q."""

    dout: Pointer
    sums: Pointer
    rows: Int64
    h_q: Int32


@kernel
def keys_kernel(
    q: HeadRows,
    queries: SparseBackwardQueries,
    kv: TokenRows,
    selections: TokenSelections,
    first_token: tl.int64,
    first_slot: tl.int32,
    slots: tl.int32,
    softmax_scale: tl.float32,
    dkv,
    ATOMIC: tl.constexpr,
    STEP: tl.constexpr,
):
    """Gradients of a tile of the keys at slots first_slot to first_slot + slots - 1 of a token's indices.

    With ATOMIC they are added to rows of ``dkv``, float32 [s_kv, d]; otherwise they are stored in ``dkv``, float32
    [tokens, slots, d].
    """
    tiles = tl.cdiv(slots, STEP.block_n)
    launched_token = (tl.program_id(0) // tiles).to(tl.int64)
    token = first_token + launched_token
    slot = (tl.program_id(0) % tiles) * STEP.block_n + tl.arange(0, STEP.block_n)  # of this launch
    length = selected_count(selections, token, first_slot + slots)
    in_use = first_slot + slot < length
    index = tl.load(first_index(selections, token) + first_slot + slot, mask=in_use, other=-1)
    valid = within(index, selections.s_kv) & in_use
    keys = load_keys(kv, index, valid, STEP)

    scale = softmax_scale * LOG2_E
    ROWS: tl.constexpr = STEP.block_n
    LATENT: tl.constexpr = STEP.latent
    ROPE: tl.constexpr = STEP.rope if STEP.rope > 0 else 1
    d_latent = tl.zeros([LATENT, ROWS] if STEP.values_first else [ROWS, LATENT], tl.float32)
    d_rope = tl.zeros([ROPE, ROWS] if STEP.values_first else [ROWS, ROPE], tl.float32)
    # Tiles without a valid key are not stored.
    heads = tl.where(tl.max(valid.to(tl.int32), axis=0) > 0, queries.h_q, 0)
    for start in tl.range(0, heads, STEP.block_h, num_stages=STEP.num_stages):
        head = start + tl.arange(0, STEP.block_h)
        query, d_out, lse2, weight, delta = _load_heads(q, queries, token, head, STEP)
        scores = tl.dot(keys.latent, tl.trans(query.latent))  # [block_n, block_h]
        if STEP.rope > 0:
            scores = tl.dot(keys.rope, tl.trans(query.rope), scores)
        dp = tl.dot(keys.latent, tl.trans(d_out))  # [block_n, block_h]
        # Rows of invalid keys may be infinite; they are not stored.
        p = tl.exp2(scores * scale - lse2[None, :])
        ds = (p * (weight[None, :] * dp - delta[None, :]) * softmax_scale).to(d_out.dtype)
        d_latent = _add_product(d_latent, (p * weight[None, :]).to(d_out.dtype), d_out, STEP)
        d_latent = _add_product(d_latent, ds, query.latent, STEP)
        if STEP.rope > 0:
            d_rope = _add_product(d_rope, ds, query.rope, STEP)

    row = tl.where(valid, index, 0).to(tl.int64) if ATOMIC else launched_token * slots + slot
    _store(dkv, row * STEP.head_dim, valid, d_latent, 0, STEP.latent_dim, ATOMIC, STEP)
    if STEP.rope > 0:
        _store(dkv, row * STEP.head_dim, valid, d_rope, STEP.latent_dim, STEP.head_dim - STEP.latent_dim, ATOMIC, STEP)


@kernel
def queries_kernel(
    q: HeadRows,
    queries: SparseBackwardQueries,
    kv: TokenRows,
    selections: TokenSelections,
    softmax_scale: tl.float32,
    dq,
    STEP: tl.constexpr,
):
    """dq of a token's block of heads."""
    head_blocks = tl.cdiv(queries.h_q, STEP.block_h)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = (tl.program_id(0) % head_blocks) * STEP.block_h + tl.arange(0, STEP.block_h)
    query, d_out, lse2, weight, delta = _load_heads(q, queries, token, head, STEP)
    length = selected_count(selections, token, selections.topk)

    scale = softmax_scale * LOG2_E
    ROWS: tl.constexpr = STEP.block_h
    LATENT: tl.constexpr = STEP.latent
    ROPE: tl.constexpr = STEP.rope if STEP.rope > 0 else 1
    d_latent = tl.zeros([LATENT, ROWS] if STEP.values_first else [ROWS, LATENT], tl.float32)
    d_rope = tl.zeros([ROPE, ROWS] if STEP.values_first else [ROWS, ROPE], tl.float32)
    for start in tl.range(0, length, STEP.block_n, num_stages=STEP.num_stages):
        slot = start + tl.arange(0, STEP.block_n)
        index = tl.load(first_index(selections, token) + tl.minimum(slot, length - 1))
        valid = within(index, selections.s_kv) & (slot < length)
        keys = load_keys(kv, index, valid, STEP)
        scores = tl.dot(query.latent, tl.trans(keys.latent))  # [block_h, block_n]
        if STEP.rope > 0:
            scores = tl.dot(query.rope, tl.trans(keys.rope), scores)
        dp = tl.dot(d_out, tl.trans(keys.latent))  # [block_h, block_n]
        p = tl.exp2(scores * scale - lse2[:, None])
        ds = p * (weight[:, None] * dp - delta[:, None]) * softmax_scale
        ds = tl.where(valid[None, :], ds, 0.0).to(d_out.dtype)
        d_latent = _add_product(d_latent, ds, keys.latent, STEP)
        if STEP.rope > 0:
            d_rope = _add_product(d_rope, ds, keys.rope, STEP)

    row = (token * queries.h_q + head) * STEP.head_dim
    _store(dq, row, head < queries.h_q, d_latent, 0, STEP.latent_dim, False, STEP)
    if STEP.rope > 0:
        _store(dq, row, head < queries.h_q, d_rope, STEP.latent_dim, STEP.head_dim - STEP.latent_dim, False, STEP)


@triton.jit
def _load_heads(q, queries, token, head, STEP: tl.constexpr):
    """Rows of q and dout of a block of a token's heads, and their row sums; beyond the last head 0, and lse +inf."""
    h_q, sums = queries.h_q, queries.sums
    in_heads = head < h_q
    query = load_tile(q.start, (token * q.token_stride + head * q.head_stride) * q.align, in_heads, STEP)
    row = token * h_q + head
    d_out = load_rows(
        queries.dout, row * STEP.latent_dim, in_heads, 0, STEP.latent_dim, STEP.latent
    )  # [block_h, latent]
    lse2 = tl.load(sums + row, mask=in_heads, other=float("inf"))
    weight = tl.load(sums + queries.rows + row, mask=in_heads, other=0.0)
    delta = tl.load(sums + 2 * queries.rows + row, mask=in_heads, other=0.0)
    return query, d_out, lse2, weight, delta


@triton.jit
def _add_product(total, p, tile, STEP: tl.constexpr):
    """total + p · tile, transposed if ``values_first``: Hopper's warp groups then divide the columns of a tile of 64
    rows, instead of each computing the whole tile.
    """
    if STEP.values_first:
        return tl.dot(tl.trans(tile), tl.trans(p), total)
    else:
        return tl.dot(p, tile, total)


@triton.jit
def _store(
    base, offsets, in_use, tile, FIRST: tl.constexpr, COUNT: tl.constexpr, ATOMIC: tl.constexpr, STEP: tl.constexpr
):
    """Store COUNT columns of a tile to elements FIRST to FIRST + COUNT - 1 of the rows at ``offsets``, or add them."""
    if STEP.values_first:
        tile = tl.trans(tile)
    cols = tl.arange(0, tile.shape[1])
    pointers = base + offsets[:, None] + (FIRST + cols)[None, :]
    mask = in_use[:, None] & (cols < COUNT)[None, :]
    if ATOMIC:
        tl.atomic_add(pointers, tile, mask=mask, sem="relaxed")
    else:
        tl.store(pointers, from_float32(tile, base.dtype.element_ty), mask=mask)
