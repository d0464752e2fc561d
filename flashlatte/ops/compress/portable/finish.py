"""What follows a group's sum: norm, rotation and quantisation; and the states that a step's tokens leave."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import page_and_offset
from flashlatte.kernels.triton.cache_row import Place, store_row
from flashlatte.kernels.triton.dependent_launch import gdc_wait
from flashlatte.kernels.triton.fp8 import widen
from flashlatte.kernels.triton.rotate import angles, turn_tail
from flashlatte.ops.compress.portable.states import States, locate_state
from flashlatte.runtime.triton_kernel import kernel


class Finish(NamedTuple):
    """What a row is multiplied and turned by: gain [D], cosine and sine [1, D // 2]."""

    gain: Any
    cosine: Any
    sine: Any


@kernel(by_element=("request_ids", "positions", "slot_mapping", "state_table"))
def compress_finish_kernel(
    kv,
    score,
    ape,
    weight,
    cos_sin,
    request_ids,
    positions,
    slot_mapping,
    cache,
    state_cache,
    state_table,
    sums,
    requests: tl.int64,
    columns: tl.int64,
    num_state_pages: tl.int64,
    state_page_size: tl.int64,
    state_page_stride: tl.int64,
    state_token_stride: tl.int64,
    table_stride: tl.int64,
    eps: tl.float32,
    first_token: tl.int64,
    num_tokens: tl.int64,
    window: tl.int32,
    save_blocks: tl.int32,
    num_slots: tl.int64,
    page_size: tl.int64,
    num_positions: tl.int64,
    id_stride: tl.int64,
    position_stride: tl.int64,
    slot_stride: tl.int64,
    kv_stride: tl.int64,
    score_stride: tl.int64,
    ape_stride: tl.int64,
    page_stride: tl.int64,
    row_stride: tl.int64,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAPS: tl.constexpr,
    FORMAT: tl.constexpr,
    UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    MAX_WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Of ``window`` tokens, programs before ``save_blocks`` save as many numbers of the states each; that one finishes
    rows whose ``sums`` the launch before has left."""
    states = States(
        state_cache,
        state_table,
        requests,
        columns,
        num_state_pages,
        state_page_size,
        state_page_stride,
        state_token_stride,
        table_stride,
    )
    lane = tl.arange(0, MAX_WINDOW)
    first = tl.program_id(0).to(tl.int64) * window
    looked_at = (lane < window) & (first + lane < num_tokens)
    if tl.program_id(1) < save_blocks:
        if state_cache is not None:
            request = tl.load(request_ids + (first + lane) * id_stride, mask=looked_at, other=-1).to(tl.int64)
            position = tl.load(positions + (first + lane) * position_stride, mask=looked_at, other=-1).to(tl.int64)
            # Unless a later token of the same call will lie there.
            later = first + lane + columns * state_page_size
            later_request = tl.load(request_ids + later * id_stride, mask=later < num_tokens, other=-1).to(tl.int64)
            saved = (request >= 0) & (request < requests) & (position >= 0) & (later_request != request)
            column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            if OVERLAPPED:
                gdc_wait()
            found = next_of(saved, lane, -1, MAX_WINDOW)
            while found < MAX_WINDOW:
                save_state(
                    kv,
                    score,
                    ape,
                    request_ids,
                    positions,
                    states,
                    first + found,
                    column,
                    id_stride,
                    position_stride,
                    kv_stride,
                    score_stride,
                    ape_stride,
                    D * (1 + OVERLAPS),
                    RATIO,
                    UNITS,
                    INTERPRETED,
                )
                found = next_of(saved, lane, found, MAX_WINDOW)
    elif sums is not None:
        finishes = finished_in(
            first,
            looked_at & (first + lane >= first_token),
            lane,
            request_ids,
            positions,
            slot_mapping,
            states,
            num_slots,
            id_stride,
            position_stride,
            slot_stride,
            RATIO,
        )
        found = next_of(finishes, lane, -1, MAX_WINDOW)
        if OVERLAPPED:
            gdc_wait()
        while found < MAX_WINDOW:
            token = first + found
            end = tl.load(positions + token * position_stride).to(tl.int64)
            finish = load_finish(weight, cos_sin, end, num_positions, D, ROPE, RATIO, INTERPRETED)
            finish_row(
                tl.load(sums + (token - first_token) * D + tl.arange(0, D)),
                token,
                finish,
                slot_mapping,
                cache,
                eps,
                slot_stride,
                page_size,
                page_stride,
                row_stride,
                D,
                ROPE,
                FORMAT,
                UNIT,
                WIDE,
                NATIVE,
                INTERPRETED,
            )
            found = next_of(finishes, lane, found, MAX_WINDOW)


@triton.jit
def finished_in(
    first,
    looked_at,
    lane,
    request_ids,
    positions,
    slot_mapping,
    states,
    num_slots,
    id_stride,
    position_stride,
    slot_stride,
    RATIO: tl.constexpr,
):
    """Which of the tokens from ``first`` on end a group that has a slot."""
    token = first + lane
    end = tl.load(positions + token * position_stride, mask=looked_at, other=-1).to(tl.int64)
    request = tl.load(request_ids + token * id_stride, mask=looked_at, other=-1).to(tl.int64)
    slot = tl.load(slot_mapping + token * slot_stride, mask=looked_at, other=-1).to(tl.int64)
    finishes = (end >= 0) & ((end + 1) % RATIO == 0) & (slot >= 0) & (slot < num_slots) & (request >= 0)
    if states.table is not None:
        finishes = finishes & (request < states.requests)
    return finishes


@triton.jit
def next_of(chosen, lane, after, MAX_WINDOW: tl.constexpr):
    """The first lane behind ``after`` that is chosen; MAX_WINDOW if none is."""
    return tl.min(tl.where(chosen & (lane > after), lane, MAX_WINDOW), axis=0)


@triton.jit
def load_finish(
    weight,
    cos_sin,
    end,
    num_positions,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    RATIO: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Of the group that ends at position ``end``."""
    gain = widen(tl.load(weight + tl.arange(0, D)), INTERPRETED)
    pair = (tl.arange(0, D // 2) - (D - ROPE) // 2)[None, :]
    cosine, sine = angles(cos_sin, end + 1 - RATIO, num_positions, pair, ROPE)
    return Finish(gain, cosine, sine)


@triton.jit
def finish_row(
    x,
    token,
    finish,
    slot_mapping,
    cache,
    eps,
    slot_stride,
    page_size,
    page_stride,
    row_stride,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    FORMAT: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Norm, turn and store the sum x [D] of the group that ends with ``token``, whose slot is in the cache."""
    slot = tl.load(slot_mapping + token * slot_stride).to(tl.int64)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / D + eps) * finish.gain
    x = turn_tail(x[None, :], finish.cosine, finish.sine, D - ROPE, 1, D)
    page, offset = page_and_offset(slot, slot >= 0, page_size, WIDE)
    place = Place(cache, page_stride, row_stride, page_size, page, offset, slot >= 0)
    store_row(x, place, D, FORMAT, UNIT, NATIVE, INTERPRETED)


@triton.jit
def save_state(
    kv,
    score,
    ape,
    request_ids,
    positions,
    states,
    token,
    column,
    id_stride,
    position_stride,
    kv_stride,
    score_stride,
    ape_stride,
    WIDTH: tl.constexpr,
    RATIO: tl.constexpr,
    UNITS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """These columns of a token's state."""
    request = tl.load(request_ids + token * id_stride).to(tl.int64)
    position = tl.load(positions + token * position_stride).to(tl.int64)
    address, found = locate_state(states, request, position, position >= 0, UNITS.state)
    inside = found & (column < WIDTH)
    values = tl.load(kv + token * kv_stride * UNITS.kv + column, mask=inside, other=0.0)
    scores = tl.load(score + token * score_stride * UNITS.score + column, mask=inside, other=0.0)
    bias = tl.load(ape + (position % RATIO) * ape_stride * UNITS.ape + column, mask=inside, other=0.0)
    row = states.cache + address
    tl.store(row + column, widen(values, INTERPRETED), mask=inside)
    tl.store(row + WIDTH + column, widen(scores, INTERPRETED) + bias, mask=inside)
