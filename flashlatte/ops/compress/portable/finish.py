"""The steps after a group's sum: norm, rotation and quantization of the row; and the write of the tokens' states."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import page_and_offset
from flashlatte.kernels.triton.cache_row import store_row
from flashlatte.kernels.triton.dependent_launch import gdc_wait
from flashlatte.kernels.triton.fp8 import to_float32
from flashlatte.kernels.triton.rotate import angles, rotate_tail_by
from flashlatte.ops.compress.portable.operands import RowTarget, States, Tokens, locate_state
from flashlatte.runtime.triton_kernel import kernel


class Finish(NamedTuple):
    """The gain [D] of the norm, and the cosine and sine [1, D // 2] of the rotation."""

    gain: Any
    cosine: Any
    sine: Any


@kernel
def compress_finish_kernel(
    tokens: Tokens,
    states: States,
    target: RowTarget,
    sums,
    first_token: tl.int64,
    num_tokens: tl.int64,
    window: tl.int32,
    save_blocks: tl.int32,
    FORM: tl.constexpr,
    MAX_WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """For ``window`` tokens, the first ``save_blocks`` programs save BLOCK columns of the states each; the last one
    finishes the rows whose ``sums`` the preceding launch has written."""
    lane = tl.arange(0, MAX_WINDOW)
    first = tl.program_id(0).to(tl.int64) * window
    in_window = (lane < window) & (first + lane < num_tokens)
    if tl.program_id(1) < save_blocks:
        if states.start is not None:
            token = first + lane
            request = tl.load(tokens.request_ids + token * tokens.id_stride, mask=in_window, other=-1).to(tl.int64)
            position = tl.load(tokens.positions + token * tokens.position_stride, mask=in_window, other=-1)
            position = position.to(tl.int64)
            # Not if a later token of the same call has the same slot of the ring.
            later = token + states.columns * states.page_size
            in_call = later < num_tokens
            later_request = tl.load(tokens.request_ids + later * tokens.id_stride, mask=in_call, other=-1).to(tl.int64)
            saved = (request >= 0) & (request < states.requests) & (position >= 0) & (later_request != request)
            column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            found = next_of(saved, lane, -1, MAX_WINDOW)
            while found < MAX_WINDOW:
                save_state(tokens, states, first + found, column, FORM, OVERLAPPED)
                found = next_of(saved, lane, found, MAX_WINDOW)
    elif sums is not None:
        finishes = finished_in(
            tokens, states, first, in_window & (first + lane >= first_token), lane, target.num_slots, FORM.ratio
        )
        found = next_of(finishes, lane, -1, MAX_WINDOW)
        while found < MAX_WINDOW:
            token = first + found
            end = tl.load(tokens.positions + token * tokens.position_stride).to(tl.int64)
            finish = load_finish(target, end, FORM)
            if OVERLAPPED:
                gdc_wait()
            x = tl.load(sums + (token - first_token) * FORM.head_dim + tl.arange(0, FORM.head_dim))
            finish_row(x, tokens, token, finish, target, FORM)
            found = next_of(finishes, lane, found, MAX_WINDOW)
    if OVERLAPPED:
        # Also in programs without work: the next launch must not start before the preceding one has ended.
        gdc_wait()


@triton.jit
def finished_in(tokens, states, first, in_window, lane, num_slots, RATIO: tl.constexpr):
    """Whether each token from ``first`` on completes a group that has a slot."""
    token = first + lane
    end = tl.load(tokens.positions + token * tokens.position_stride, mask=in_window, other=-1).to(tl.int64)
    request = tl.load(tokens.request_ids + token * tokens.id_stride, mask=in_window, other=-1).to(tl.int64)
    slot = tl.load(tokens.slot_mapping + token * tokens.slot_stride, mask=in_window, other=-1).to(tl.int64)
    finishes = (end >= 0) & ((end + 1) % RATIO == 0) & (slot >= 0) & (slot < num_slots) & (request >= 0)
    if states.table is not None:
        finishes = finishes & (request < states.requests)
    return finishes


@triton.jit
def next_of(chosen, lane, after, MAX_WINDOW: tl.constexpr):
    """The first chosen lane after lane ``after``; MAX_WINDOW if there is none."""
    return tl.min(tl.where(chosen & (lane > after), lane, MAX_WINDOW), axis=0)


@triton.jit
def load_finish(target, end, FORM: tl.constexpr):
    """The gain and rotation of the group that ends at position ``end``."""
    D: tl.constexpr = FORM.head_dim
    gain = to_float32(tl.load(target.weight + tl.arange(0, D)))
    pair = (tl.arange(0, D // 2) - (D - FORM.rope_dim) // 2)[None, :]
    cosine, sine = angles(target.cos_sin, end + 1 - FORM.ratio, target.num_positions, pair, FORM.rope_dim)
    return Finish(gain, cosine, sine)


@triton.jit
def finish_row(x, tokens, token, finish, target, FORM: tl.constexpr):
    """Normalize, rotate and store the sum x [head_dim] of the group that ends with ``token``, whose slot is in the
    cache."""
    D: tl.constexpr = FORM.head_dim
    ROW_BYTES: tl.constexpr = FORM.row_bytes
    slot = tl.load(tokens.slot_mapping + token * tokens.slot_stride).to(tl.int64)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / D + target.eps) * finish.gain
    x = rotate_tail_by(x[None, :], finish.cosine, finish.sine, D - FORM.rope_dim, 1, D)
    page, offset = page_and_offset(slot, slot >= 0, target.page_size, FORM.wide)
    store_row(x, target, target.page_size, slot >= 0, page, offset, D, ROW_BYTES, FORM.native)


@triton.jit
def save_state(tokens, states, token, column, FORM: tl.constexpr, OVERLAPPED: tl.constexpr):
    """Save these columns of a token's state. Inputs may be loaded while the preceding launch, which reads states, still
    runs."""
    WIDTH: tl.constexpr = FORM.head_dim * (1 + FORM.overlaps)
    request = tl.load(tokens.request_ids + token * tokens.id_stride).to(tl.int64)
    position = tl.load(tokens.positions + token * tokens.position_stride).to(tl.int64)
    row, found = locate_state(states, request, position, position >= 0)
    inside = found & (column < WIDTH)
    kv_row = tokens.kv + token * tokens.kv_stride * tokens.kv_align
    values = tl.load(kv_row + column, mask=inside, other=0.0)
    score_row = tokens.score + token * tokens.score_stride * tokens.score_align
    scores = tl.load(score_row + column, mask=inside, other=0.0)
    bias_row = tokens.ape + (position % FORM.ratio) * tokens.ape_stride * tokens.ape_align
    bias = tl.load(bias_row + column, mask=inside, other=0.0)
    if OVERLAPPED:
        gdc_wait()
    tl.store(row + column, to_float32(values), mask=inside)
    tl.store(row + WIDTH + column, to_float32(scores) + bias, mask=inside)
