"""Gradients of the indexer's loss from those of the index logits, G = p - t in float32 [tokens, width].

With s = index_scale · index_q · index_k and r = 1 where s > 0 (everywhere without relu):
d index_weights = Σ_j G relu(s), d index_q = index_scale · index_weights Σ_j G r index_k, and
d index_k = index_scale · Σ_h G r index_weights index_q. Each kernel computes s again. Terms as in ``loss_kernels``.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import from_float32, to_float32
from flashlatte.kernels.triton.online_softmax import load_tile
from flashlatte.ops.indexer_loss.portable.seen_keys import keys_at, slot_range
from flashlatte.runtime.triton_kernel import kernel


@kernel
def index_queries_kernel(
    index_q,
    index_q_stride_token: tl.int64,
    index_q_stride_head: tl.int64,
    index_k,
    index_k_stride: tl.int64,
    index_weights,
    weights_stride: tl.int64,
    ranges,
    indices,
    indices_stride: tl.int64,
    s_q: tl.int32,
    s_kv: tl.int32,
    width: tl.int32,
    h_i: tl.int32,
    index_scale: tl.float32,
    first_token: tl.int64,
    d_logits,
    sees_keys,
    d_index_q,
    d_index_weights,
    USE_RELU: tl.constexpr,
    ALIGN: tl.constexpr,
    STEP: tl.constexpr,
):
    """Gradients of index_q and index_weights, for a token's block of heads."""
    head_blocks = tl.cdiv(h_i, STEP.block_h)
    row = (tl.program_id(0) // head_blocks).to(tl.int64)
    token = first_token + row
    head = (tl.program_id(0) % head_blocks) * STEP.block_h + tl.arange(0, STEP.block_h)
    in_heads = head < h_i
    # index_q and index_weights of a token that sees no key may be NaN.
    in_use = in_heads & (tl.load(sees_keys + token) != 0)
    offset = (token * index_q_stride_token + head * index_q_stride_head) * ALIGN
    query = load_tile(index_q, offset, in_use, STEP)
    begin, end = slot_range(ranges, s_q, token)

    BLOCK_H: tl.constexpr = STEP.block_h
    BLOCK_N: tl.constexpr = STEP.block_n
    WIDTH: tl.constexpr = STEP.latent
    d_query = tl.zeros([BLOCK_H, WIDTH], tl.float32)
    d_weight = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
    for start in tl.range(begin // STEP.block_n * STEP.block_n, end, STEP.block_n, num_stages=STEP.num_stages):
        slot = start + tl.arange(0, STEP.block_n)
        key, seen = keys_at(slot, begin, end, indices, token * indices_stride, width, s_kv)
        keys = load_tile(index_k, key * index_k_stride * ALIGN, seen, STEP)
        d_logit = tl.load(d_logits + row * width + slot, mask=seen, other=0.0)
        scores = tl.dot(query.latent, tl.trans(keys.latent)) * index_scale  # [block_h, block_n]
        d_score = tl.broadcast_to(d_logit[None, :], scores.shape)
        if USE_RELU:
            d_score = tl.where(scores > 0, d_score, 0.0)
        d_weight += d_score * scores
        d_query = tl.dot(d_score.to(keys.latent.dtype), keys.latent, d_query)

    weight = tl.load(index_weights + token * weights_stride + head, mask=in_use, other=0)
    d_query *= (to_float32(weight, STEP.interpreted) * index_scale)[:, None]
    cols = tl.arange(0, STEP.latent)
    row_offset = token * h_i + head
    pointers = d_index_q + row_offset[:, None] * STEP.head_dim + cols[None, :]
    mask = in_heads[:, None] & (cols < STEP.head_dim)[None, :]
    tl.store(pointers, from_float32(d_query, d_index_q.dtype.element_ty, STEP.interpreted), mask=mask)
    tl.store(d_index_weights + row_offset, tl.sum(d_weight, axis=1), mask=in_heads)


@kernel
def selected_keys_kernel(
    index_q,
    index_q_stride_token: tl.int64,
    index_q_stride_head: tl.int64,
    index_k,
    index_k_stride: tl.int64,
    index_weights,
    weights_stride: tl.int64,
    ranges,
    indices,
    indices_stride: tl.int64,
    s_q: tl.int32,
    s_kv: tl.int32,
    width: tl.int32,
    h_i: tl.int32,
    index_scale: tl.float32,
    first_token: tl.int64,
    d_logits,
    first_row: tl.int64,
    first_slot: tl.int32,
    slots: tl.int32,
    d_index_k,
    USE_RELU: tl.constexpr,
    ATOMIC: tl.constexpr,
    ALIGN: tl.constexpr,
    STEP: tl.constexpr,
):
    """Gradients of a tile of the index keys at slots first_slot to first_slot + slots of a token's indices.

    The token is ``first_row`` tokens after ``first_token``, or later. With ATOMIC they are added to rows of
    ``d_index_k`` [s_kv, d_i], else stored in ``d_index_k`` [tokens, slots, d_i]; float32.
    """
    tiles = tl.cdiv(slots, STEP.block_n)
    launched = (tl.program_id(0) // tiles).to(tl.int64)
    row = first_row + launched
    token = first_token + row
    launched_slot = (tl.program_id(0) % tiles) * STEP.block_n + tl.arange(0, STEP.block_n)
    slot = first_slot + launched_slot
    begin, end = slot_range(ranges, s_q, token)
    end = tl.minimum(end, first_slot + slots)
    key, seen = keys_at(slot, begin, end, indices, token * indices_stride, width, s_kv)
    keys = load_tile(index_k, key * index_k_stride * ALIGN, seen, STEP)
    d_logit = tl.load(d_logits + row * width + slot, mask=seen, other=0.0)

    BLOCK_N: tl.constexpr = STEP.block_n
    WIDTH: tl.constexpr = STEP.latent
    d_keys = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    # Without a key nothing is stored.
    heads = tl.where(tl.max(seen.to(tl.int32), axis=0) > 0, h_i, 0)
    for start in tl.range(0, heads, STEP.block_h, num_stages=STEP.num_stages):
        head = start + tl.arange(0, STEP.block_h)
        in_heads = head < h_i
        offset = (token * index_q_stride_token + head * index_q_stride_head) * ALIGN
        query = load_tile(index_q, offset, in_heads, STEP)
        weight = tl.load(index_weights + token * weights_stride + head, mask=in_heads, other=0)
        d_keys = _add_gradient(d_keys, keys, query, to_float32(weight, STEP.interpreted), d_logit, USE_RELU)

    d_keys *= index_scale
    cols = tl.arange(0, STEP.latent)
    to_row = key if ATOMIC else launched * slots + launched_slot
    pointers = d_index_k + to_row[:, None] * STEP.head_dim + cols[None, :]
    mask = seen[:, None] & (cols < STEP.head_dim)[None, :]
    if ATOMIC:
        tl.atomic_add(pointers, d_keys, mask=mask, sem="relaxed")
    else:
        tl.store(pointers, d_keys, mask=mask)


@kernel
def range_keys_kernel(
    index_q,
    index_q_stride_token: tl.int64,
    index_q_stride_head: tl.int64,
    index_k,
    index_k_stride: tl.int64,
    index_weights,
    weights_stride: tl.int64,
    ranges,
    s_q: tl.int32,
    s_kv: tl.int32,
    h_i: tl.int32,
    index_scale: tl.float32,
    first_token: tl.int64,
    tokens: tl.int32,
    d_logits,
    d_index_k,
    USE_RELU: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
    STEP: tl.constexpr,
):
    """Gradients of a tile of index keys from GROUP of the launch's ``tokens``: ``d_index_k`` [groups, s_kv, d_i]."""
    tiles = tl.cdiv(s_kv, STEP.block_n)
    group = tl.program_id(0) // tiles
    key = (tl.program_id(0) % tiles) * STEP.block_n + tl.arange(0, STEP.block_n)
    in_use = key < s_kv
    keys = load_tile(index_k, key.to(tl.int64) * index_k_stride * ALIGN, in_use, STEP)

    # Of the group, the tokens from the first to the last that see a key of the tile.
    member = group * GROUP + tl.arange(0, GROUP)
    begins, ends = slot_range(ranges, s_q, first_token + tl.minimum(member, tokens - 1))
    first_key = (tl.program_id(0) % tiles) * STEP.block_n
    sees = (member < tokens) & (begins < first_key + STEP.block_n) & (ends > first_key) & (begins < ends)
    first = tl.min(tl.where(sees, member, tokens), axis=0)
    last = tl.max(tl.where(sees, member + 1, 0), axis=0)
    head_blocks = tl.cdiv(h_i, STEP.block_h)

    BLOCK_N: tl.constexpr = STEP.block_n
    WIDTH: tl.constexpr = STEP.latent
    d_keys = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    # One loop: with a loop over heads in one over tokens, Triton would not load the next token's heads ahead.
    for step in tl.range(first * head_blocks, last * head_blocks, num_stages=STEP.num_stages):
        row = (step // head_blocks).to(tl.int64)
        token = first_token + row
        begin, end = slot_range(ranges, s_q, token)
        seen = (key >= begin) & (key < end)
        d_logit = tl.load(d_logits + row * s_kv + key, mask=seen, other=0.0)
        head = (step % head_blocks) * STEP.block_h + tl.arange(0, STEP.block_h)
        # index_q and index_weights of a token that sees no key may be NaN.
        in_heads = (head < h_i) & (begin < end)
        offset = (token * index_q_stride_token + head * index_q_stride_head) * ALIGN
        query = load_tile(index_q, offset, in_heads, STEP)
        weight = tl.load(index_weights + token * weights_stride + head, mask=in_heads, other=0)
        d_keys = _add_gradient(d_keys, keys, query, to_float32(weight, STEP.interpreted), d_logit, USE_RELU)

    cols = tl.arange(0, STEP.latent)
    pointers = d_index_k + (group.to(tl.int64) * s_kv + key)[:, None] * STEP.head_dim + cols[None, :]
    tl.store(pointers, d_keys * index_scale, mask=in_use[:, None] & (cols < STEP.head_dim)[None, :])


@triton.jit
def _add_gradient(d_keys, keys, query, weight, d_logit, USE_RELU: tl.constexpr):
    """d_keys [block_n, latent] plus the terms of a block of heads; ``d_logit`` is [block_n], ``weight`` [block_h]."""
    d_score = d_logit[:, None] * weight[None, :]
    if USE_RELU:
        scores = tl.dot(keys.latent, tl.trans(query.latent))
        d_score = tl.where(scores > 0, d_score, 0.0)
    return tl.dot(d_score.to(query.latent.dtype), query.latent, d_keys)
