"""Gradients of the indexer's loss from those of the index logits, G = p - t in float32 [tokens, width].

With s = index_scale · index_q · index_k and r = 1 where s > 0 (everywhere without relu):
d index_weights = Σ_j G relu(s), d index_q = index_scale · index_weights Σ_j G r index_k, and
d index_k = index_scale · Σ_h G r index_weights index_q. Each kernel computes s again. Terms as in ``loss_kernels``.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import from_float32, to_float32
from flashlatte.kernels.triton.online_softmax import load_tile
from flashlatte.ops.indexer_loss.seen_keys import IndexerRows, SlotRanges, keys_at, query_offset, slot_range
from flashlatte.runtime.triton_kernel import kernel


@kernel
def index_queries_kernel(
    slots: SlotRanges,
    indexer: IndexerRows,
    first_token: tl.int64,
    d_logits,
    sees_keys,
    d_index_q,
    d_index_weights,
    STEP: tl.constexpr,
):
    """Gradients of index_q and index_weights for a block of heads of a token."""
    head_blocks = tl.cdiv(indexer.h_i, STEP.block_h)
    row = (tl.program_id(0) // head_blocks).to(tl.int64)
    token = first_token + row
    head = (tl.program_id(0) % head_blocks) * STEP.block_h + tl.arange(0, STEP.block_h)
    in_heads = head < indexer.h_i
    # index_q and indexer.weights of a token without visible keys may be NaN.
    in_use = in_heads & (tl.load(sees_keys + token) != 0)
    query = load_tile(indexer.q, query_offset(indexer, token, head), in_use, STEP)
    begin, end = slot_range(slots, token)

    BLOCK_H: tl.constexpr = STEP.block_h
    BLOCK_N: tl.constexpr = STEP.block_n
    WIDTH: tl.constexpr = STEP.latent
    d_query = tl.zeros([BLOCK_H, WIDTH], tl.float32)
    d_weight = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
    for start in tl.range(begin // STEP.block_n * STEP.block_n, end, STEP.block_n, num_stages=STEP.num_stages):
        slot = start + tl.arange(0, STEP.block_n)
        key, seen = keys_at(slot, begin, end, slots, token)
        keys = load_tile(indexer.k, key * indexer.k_stride * indexer.align, seen, STEP)
        d_logit = tl.load(d_logits + row * slots.width + slot, mask=seen, other=0.0)
        scores = tl.dot(query.latent, tl.trans(keys.latent)) * indexer.index_scale  # [block_h, block_n]
        d_score = tl.broadcast_to(d_logit[None, :], scores.shape)
        if indexer.use_relu:
            d_score = tl.where(scores > 0, d_score, 0.0)
        d_weight += d_score * scores
        d_query = tl.dot(d_score.to(keys.latent.dtype), keys.latent, d_query)

    weight = tl.load(indexer.weights + token * indexer.weights_stride + head, mask=in_use, other=0)
    d_query *= (to_float32(weight) * indexer.index_scale)[:, None]
    cols = tl.arange(0, STEP.latent)
    row_offset = token * indexer.h_i + head
    pointers = d_index_q + row_offset[:, None] * STEP.head_dim + cols[None, :]
    mask = in_heads[:, None] & (cols < STEP.head_dim)[None, :]
    tl.store(pointers, from_float32(d_query, d_index_q.dtype.element_ty), mask=mask)
    tl.store(d_index_weights + row_offset, tl.sum(d_weight, axis=1), mask=in_heads)


@kernel
def selected_keys_kernel(
    slots: SlotRanges,
    indexer: IndexerRows,
    first_token: tl.int64,
    d_logits,
    first_row: tl.int64,
    first_slot: tl.int32,
    num_slots: tl.int32,
    d_index_k,
    ATOMIC: tl.constexpr,
    STEP: tl.constexpr,
):
    """Gradients of a tile of the index keys at slots first_slot to first_slot + num_slots - 1 of a token's indices.

    Tokens are counted from ``first_token`` + ``first_row``. With ATOMIC the gradients are added to rows of
    ``d_index_k``, float32 [s_kv, d_i]; otherwise they are stored in ``d_index_k``, float32 [tokens, num_slots, d_i].
    """
    tiles = tl.cdiv(num_slots, STEP.block_n)
    launched = (tl.program_id(0) // tiles).to(tl.int64)
    row = first_row + launched
    token = first_token + row
    launched_slot = (tl.program_id(0) % tiles) * STEP.block_n + tl.arange(0, STEP.block_n)
    slot = first_slot + launched_slot
    begin, end = slot_range(slots, token)
    end = tl.minimum(end, first_slot + num_slots)
    key, seen = keys_at(slot, begin, end, slots, token)
    keys = load_tile(indexer.k, key * indexer.k_stride * indexer.align, seen, STEP)
    d_logit = tl.load(d_logits + row * slots.width + slot, mask=seen, other=0.0)

    BLOCK_N: tl.constexpr = STEP.block_n
    WIDTH: tl.constexpr = STEP.latent
    d_keys = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    # Slots without a valid key are not stored.
    heads = tl.where(tl.max(seen.to(tl.int32), axis=0) > 0, indexer.h_i, 0)
    for start in tl.range(0, heads, STEP.block_h, num_stages=STEP.num_stages):
        head = start + tl.arange(0, STEP.block_h)
        in_heads = head < indexer.h_i
        query = load_tile(indexer.q, query_offset(indexer, token, head), in_heads, STEP)
        weight = tl.load(indexer.weights + token * indexer.weights_stride + head, mask=in_heads, other=0)
        d_keys = _add_gradient(d_keys, keys, query, to_float32(weight), d_logit, indexer.use_relu)

    d_keys *= indexer.index_scale
    cols = tl.arange(0, STEP.latent)
    to_row = key if ATOMIC else launched * num_slots + launched_slot
    pointers = d_index_k + to_row[:, None] * STEP.head_dim + cols[None, :]
    mask = seen[:, None] & (cols < STEP.head_dim)[None, :]
    if ATOMIC:
        tl.atomic_add(pointers, d_keys, mask=mask, sem="relaxed")
    else:
        tl.store(pointers, d_keys, mask=mask)


@kernel
def range_keys_kernel(
    slots: SlotRanges,
    indexer: IndexerRows,
    first_token: tl.int64,
    tokens: tl.int32,
    d_logits,
    d_index_k,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
):
    """Gradients of a tile of index keys from GROUP of the launch's ``tokens``: ``d_index_k`` [groups, s_kv, d_i]."""
    tiles = tl.cdiv(slots.s_kv, STEP.block_n)
    group = tl.program_id(0) // tiles
    key = (tl.program_id(0) % tiles) * STEP.block_n + tl.arange(0, STEP.block_n)
    in_use = key < slots.s_kv
    keys = load_tile(indexer.k, key.to(tl.int64) * indexer.k_stride * indexer.align, in_use, STEP)

    # The tokens of the group from the first to the last that attend to a key of the tile.
    member = group * GROUP + tl.arange(0, GROUP)
    begins, ends = slot_range(slots, first_token + tl.minimum(member, tokens - 1))
    first_key = (tl.program_id(0) % tiles) * STEP.block_n
    sees = (member < tokens) & (begins < first_key + STEP.block_n) & (ends > first_key) & (begins < ends)
    first = tl.min(tl.where(sees, member, tokens), axis=0)
    last = tl.max(tl.where(sees, member + 1, 0), axis=0)
    head_blocks = tl.cdiv(indexer.h_i, STEP.block_h)

    BLOCK_N: tl.constexpr = STEP.block_n
    WIDTH: tl.constexpr = STEP.latent
    d_keys = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    # One loop instead of a loop over heads within a loop over tokens: Triton pipelines loads only within one loop.
    for step in tl.range(first * head_blocks, last * head_blocks, num_stages=STEP.num_stages):
        row = (step // head_blocks).to(tl.int64)
        token = first_token + row
        begin, end = slot_range(slots, token)
        seen = (key >= begin) & (key < end)
        d_logit = tl.load(d_logits + row * slots.s_kv + key, mask=seen, other=0.0)
        head = (step % head_blocks) * STEP.block_h + tl.arange(0, STEP.block_h)
        # index_q and indexer.weights of a token without visible keys may be NaN.
        in_heads = (head < indexer.h_i) & (begin < end)
        query = load_tile(indexer.q, query_offset(indexer, token, head), in_heads, STEP)
        weight = tl.load(indexer.weights + token * indexer.weights_stride + head, mask=in_heads, other=0)
        d_keys = _add_gradient(d_keys, keys, query, to_float32(weight), d_logit, indexer.use_relu)

    cols = tl.arange(0, STEP.latent)
    pointers = d_index_k + (group.to(tl.int64) * slots.s_kv + key)[:, None] * STEP.head_dim + cols[None, :]
    tl.store(pointers, d_keys * indexer.index_scale, mask=in_use[:, None] & (cols < STEP.head_dim)[None, :])


@triton.jit
def _add_gradient(d_keys, keys, query, weight, d_logit, USE_RELU: tl.constexpr):
    """d_keys [block_n, latent] plus the terms of a block of heads; ``d_logit`` is [block_n], ``weight`` [block_h]."""
    d_score = d_logit[:, None] * weight[None, :]
    if USE_RELU:
        scores = tl.dot(keys.latent, tl.trans(query.latent))
        d_score = tl.where(scores > 0, d_score, 0.0)
    return tl.dot(d_score.to(query.latent.dtype), query.latent, d_keys)
