"""The indexer's loss: lse and target of the attention, index logits, and the divergence of their softmax.

``seen_keys`` defines the records. ``target`` and ``logits`` are scratch, float32 [tokens, width], for tokens from
``first_token`` on; kernels write and read only a token's slots within ``SlotRanges.ranges``. STEP is a
``kernels.triton.config.StepConfig``.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import to_float32
from flashlatte.kernels.triton.online_softmax import LN_2, LOG2_E, load_tile
from flashlatte.ops.indexer_loss.divergence import add_logits, divergence_terms, lse_of_lanes
from flashlatte.ops.indexer_loss.seen_keys import (
    AttentionRows,
    IndexerRows,
    SlotRanges,
    keys_at,
    query_offset,
    slot_range,
)
from flashlatte.runtime.triton_kernel import kernel


@kernel
def lse_kernel(
    slots: SlotRanges,
    attention: AttentionRows,
    lse,
    STEP: tl.constexpr,
):
    """lse [s_q, h_q] for a block of heads of a token, natural logarithm; -inf if the token attends to no key."""
    head_blocks = tl.cdiv(attention.h_q, STEP.block_h)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = (tl.program_id(0) % head_blocks) * STEP.block_h + tl.arange(0, STEP.block_h)
    query = load_tile(attention.q, query_offset(attention, token, head), head < attention.h_q, STEP)
    begin, end = slot_range(slots, token)

    scale = attention.softmax_scale * LOG2_E
    BLOCK_H: tl.constexpr = STEP.block_h
    row_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_H], tl.float32)
    for start in tl.range(begin // STEP.block_n * STEP.block_n, end, STEP.block_n, num_stages=STEP.num_stages):
        slot = start + tl.arange(0, STEP.block_n)
        key, seen = keys_at(slot, begin, end, slots, token)
        keys = load_tile(attention.kv, key * attention.kv_stride * attention.align, seen, STEP)
        scores = tl.dot(query.latent, tl.trans(keys.latent))  # [block_h, block_n]
        if STEP.rope > 0:
            scores = tl.dot(query.rope, tl.trans(keys.rope), scores)
        scores = tl.where(seen[None, :], scores * scale, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2(row_max - shift) + tl.sum(tl.exp2(scores - shift[:, None]), axis=1)
        row_max = new_max
    is_empty = row_max == float("-inf")
    row_lse = tl.where(is_empty, float("-inf"), row_max + tl.log2(tl.where(is_empty, 1.0, row_sum)))
    tl.store(lse + token * attention.h_q + head, row_lse * LN_2, mask=head < attention.h_q)


@kernel
def target_kernel(
    slots: SlotRanges,
    attention: AttentionRows,
    lse,
    lse_stride_token: tl.int64,
    lse_stride_head: tl.int64,
    first_token: tl.int64,
    target,
    SPLIT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Probabilities of SPLIT slots of a token, summed over heads; 0 for masked keys."""
    splits = tl.cdiv(slots.width, SPLIT)
    row = (tl.program_id(0) // splits).to(tl.int64)
    token = first_token + row
    begin, end = slot_range(slots, token)
    first, last = _split(tl.program_id(0) % splits, begin, end, SPLIT, STEP)

    scale = attention.softmax_scale * LOG2_E
    for first_head in tl.range(0, tl.where(first < last, attention.h_q, 0), STEP.block_h):
        # Sums over the heads before may have been stored by other threads.
        tl.debug_barrier()
        head = first_head + tl.arange(0, STEP.block_h)
        query = load_tile(attention.q, query_offset(attention, token, head), head < attention.h_q, STEP)
        row_lse = tl.load(
            lse + token * lse_stride_token + head * lse_stride_head, mask=head < attention.h_q, other=float("inf")
        )
        for start in tl.range(first, last, STEP.block_n, num_stages=STEP.num_stages):
            slot = start + tl.arange(0, STEP.block_n)
            key, seen = keys_at(slot, begin, last, slots, token)
            keys = load_tile(attention.kv, key * attention.kv_stride * attention.align, seen, STEP)
            scores = tl.dot(query.latent, tl.trans(keys.latent))  # [block_h, block_n]
            if STEP.rope > 0:
                scores = tl.dot(query.rope, tl.trans(keys.rope), scores)
            of_heads = tl.sum(tl.exp2(scores * scale - (row_lse * LOG2_E)[:, None]), axis=0)
            in_use = (slot >= begin) & (slot < last)
            before = tl.load(target + row * slots.width + slot, mask=in_use & (first_head > 0), other=0.0)
            tl.store(target + row * slots.width + slot, tl.where(seen, before + of_heads, 0.0), mask=in_use)


@kernel
def logits_kernel(
    slots: SlotRanges,
    indexer: IndexerRows,
    first_token: tl.int64,
    logits,
    SPLIT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Index logits of SPLIT slots of a token; -inf for masked keys."""
    splits = tl.cdiv(slots.width, SPLIT)
    row = (tl.program_id(0) // splits).to(tl.int64)
    token = first_token + row
    begin, end = slot_range(slots, token)
    first, last = _split(tl.program_id(0) % splits, begin, end, SPLIT, STEP)

    for first_head in tl.range(0, tl.where(first < last, indexer.h_i, 0), STEP.block_h):
        # Sums over the heads before may have been stored by other threads.
        tl.debug_barrier()
        head = first_head + tl.arange(0, STEP.block_h)
        query = load_tile(indexer.q, query_offset(indexer, token, head), head < indexer.h_i, STEP)
        loaded = tl.load(indexer.weights + token * indexer.weights_stride + head, mask=head < indexer.h_i, other=0)
        weight = to_float32(loaded)
        for start in tl.range(first, last, STEP.block_n, num_stages=STEP.num_stages):
            slot = start + tl.arange(0, STEP.block_n)
            key, seen = keys_at(slot, begin, last, slots, token)
            keys = load_tile(indexer.k, key * indexer.k_stride * indexer.align, seen, STEP)
            scores = tl.dot(query.latent, tl.trans(keys.latent)) * indexer.index_scale  # [block_h, block_n]
            if indexer.use_relu:
                scores = tl.maximum(scores, 0.0, propagate_nan=tl.PropagateNan.ALL)
            of_heads = tl.sum(weight[:, None] * scores, axis=0)
            in_use = (slot >= begin) & (slot < last)
            before = tl.load(logits + row * slots.width + slot, mask=in_use & (first_head > 0), other=0.0)
            tl.store(logits + row * slots.width + slot, tl.where(seen, before + of_heads, float("-inf")), mask=in_use)


@kernel
def loss_kernel(
    slots: SlotRanges,
    target,
    logits,
    first_token: tl.int64,
    losses,
    sees_keys,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the divergence of a token to ``losses`` [s_q], and whether it attends to any key; with a gradient,
    overwrite its logits with their gradients.
    """
    row = tl.program_id(0).to(tl.int64)
    token = first_token + row
    begin, end = slot_range(slots, token)
    first = begin // BLOCK * BLOCK
    cols = tl.arange(0, BLOCK)
    target += row * slots.width
    logits += row * slots.width

    lane_max = tl.full([BLOCK], float("-inf"), tl.float32)
    lane_sum = tl.zeros([BLOCK], tl.float32)
    target_sum = tl.zeros([BLOCK], tl.float32)
    seen = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(first, end, BLOCK):
        in_use = (start + cols >= begin) & (start + cols < end)
        logit = tl.load(logits + start + cols, mask=in_use, other=float("-inf"))
        target_sum += tl.load(target + start + cols, mask=in_use, other=0.0)
        seen |= (logit != float("-inf")).to(tl.int32)
        lane_max, lane_sum = add_logits(lane_max, lane_sum, logit)
    lse = lse_of_lanes(lane_max, lane_sum)
    total = tl.sum(target_sum, axis=0)
    has_target = total != 0
    total = tl.where(has_target, total, 1.0)

    divergence = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(first, end, BLOCK):
        in_use = (start + cols >= begin) & (start + cols < end)
        logit = tl.load(logits + start + cols, mask=in_use, other=float("-inf"))
        # A correctly rounded division, as in PyTorch: if a token has a single key, its target is 1 and its gradient 0.
        t = tl.div_rn(tl.load(target + start + cols, mask=in_use, other=0.0), total)
        terms, gradient = divergence_terms(logit, t, lse, has_target)
        divergence += terms
        if WITH_GRADIENT:
            tl.store(logits + start + cols, gradient, mask=in_use)
    tl.store(losses + token, tl.sum(divergence, axis=0))
    tl.store(sees_keys + token, tl.max(seen, axis=0).to(tl.int8))


@triton.jit
def _split(number, begin, end, SPLIT: tl.constexpr, STEP: tl.constexpr):
    """(first, last) of the slots of a split, in steps of ``block_n``; none if first >= last."""
    first = tl.maximum(number * SPLIT, begin // STEP.block_n * STEP.block_n)
    return first, tl.minimum((number + 1) * SPLIT, end)
