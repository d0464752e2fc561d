"""``compress`` in Triton: one launch makes the rows, the next saves what later calls will need.

In this order a ring of states is read before it is written, whatever its length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import page_and_offset
from flashlatte.kernels.triton.cache_layout import as_bytes, blocks, unit_bytes
from flashlatte.kernels.triton.cache_row import Place, row_bytes, store_row
from flashlatte.kernels.triton.fp8 import converts_e4m3, widen
from flashlatte.kernels.triton.rotate import rotate_tail
from flashlatte.ops.compress.problem import Problem
from flashlatte.runtime import machine
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel, launching_on

# A program looks for finished groups among so many tokens, fewer where there are few programs.
MAX_WINDOW = 16
TOKENS_OF_SMALL_STEPS = 512
# Rows are dealt to lanes of warps, which meet once, when all have been read. A thread holds so many numbers of kv at
# once, as many columns as it loads together, of several rows: all of a short group, or what fits the registers.
SHORT_GROUP, NUMBERS_OF_SHORT, NUMBERS_OF_LONG, MAX_WARPS = 8, 32, 16, 8
SAVE_BLOCK, SAVE_WARPS = 1024, 4


def compress(problem: Problem) -> None:
    kv, score, state_cache, state_table = problem.kv, problem.score, problem.state_cache, problem.state_table
    cache = as_bytes(problem.cache)
    tokens, width = kv.shape
    head_dim = problem.weight.shape[0]
    page_stride = stride_in_use(cache, 0)
    # Formats of bytes have a distance of their own from token to token.
    row_stride = 0 if cache.element_size() == 1 else stride_in_use(cache, 1)
    unit = unit_bytes(cache, page_stride, row_stride) // cache.element_size()
    kv_unit = unit_bytes(kv, stride_in_use(kv, 0)) // kv.element_size()
    score_unit = unit_bytes(score, stride_in_use(score, 0)) // score.element_size()
    num_slots = cache.shape[0] * cache.shape[1]
    rows = triton.next_power_of_2(problem.ratio * (1 + problem.overlaps))
    together = 16 // kv.element_size()
    block = min(rows, (NUMBERS_OF_SHORT if rows <= SHORT_GROUP else NUMBERS_OF_LONG) // together)
    lanes = min(rows // block, max(32 * MAX_WARPS * together // head_dim, 1))
    window = max(1, min(problem.ratio, MAX_WINDOW, tokens // TOKENS_OF_SMALL_STEPS))
    state, state_unit = _state(state_cache, state_table)
    with launching_on(kv.device):
        compress_kernel[(blocks(tokens, window),)](
            kv=kv,
            score=score,
            ape=problem.ape,
            weight=problem.weight,
            cos_sin=problem.cos_sin,
            request_ids=problem.request_ids,
            positions=problem.positions,
            slot_mapping=problem.slot_mapping,
            cache=cache,
            **state,
            eps=problem.eps,
            num_tokens=tokens,
            window=window,
            num_slots=num_slots,
            page_size=cache.shape[1],
            num_positions=problem.cos_sin.shape[0],
            id_stride=problem.request_ids.stride(0),
            position_stride=problem.positions.stride(0),
            slot_stride=problem.slot_mapping.stride(0),
            kv_stride=stride_in_use(kv, 0) // kv_unit,
            score_stride=stride_in_use(score, 0) // score_unit,
            ape_stride=stride_in_use(problem.ape, 0),
            page_stride=page_stride // unit,
            row_stride=row_stride // unit,
            D=head_dim,
            ROPE=problem.cos_sin.shape[1],
            RATIO=problem.ratio,
            OVERLAPS=problem.overlaps,
            FORMAT=row_bytes(problem.layout, problem.scale_rounding),
            KV_UNIT=kv_unit,
            SCORE_UNIT=score_unit,
            STATE_UNIT=state_unit,
            UNIT=unit,
            WIDE=num_slots >= 2**31,
            NATIVE=converts_e4m3(cache.device),
            INTERPRETED=machine.interpreting(),
            BLOCK_T=block,
            LANES=lanes,
            MAX_WINDOW=MAX_WINDOW,
            num_warps=max(1, lanes * head_dim // (32 * together)),
            enable_fp_fusion=False,
        )
        if state_cache is None or state_table is None:
            return
        save_state_kernel[(tokens, blocks(width, SAVE_BLOCK))](
            kv=kv,
            score=score,
            ape=problem.ape,
            request_ids=problem.request_ids,
            positions=problem.positions,
            **state,
            num_tokens=tokens,
            id_stride=problem.request_ids.stride(0),
            position_stride=problem.positions.stride(0),
            kv_stride=stride_in_use(kv, 0) // kv_unit,
            score_stride=stride_in_use(score, 0) // score_unit,
            ape_stride=stride_in_use(problem.ape, 0),
            WIDTH=width,
            RATIO=problem.ratio,
            KV_UNIT=kv_unit,
            SCORE_UNIT=score_unit,
            STATE_UNIT=state_unit,
            INTERPRETED=machine.interpreting(),
            BLOCK=SAVE_BLOCK,
            num_warps=SAVE_WARPS,
        )


def _state(cache: torch.Tensor | None, table: torch.Tensor | None) -> tuple[dict[str, Any], int]:
    """The paged states as kernels name them, and the unit of their strides in numbers."""
    pages, page_size, page_stride, token_stride, unit = 1, 1, 1, 0, 1
    if cache is not None:
        pages, page_size = cache.shape[:2]
        page_stride, token_stride = stride_in_use(cache, 0), stride_in_use(cache, 1)
        unit = unit_bytes(cache, page_stride, token_stride) // cache.element_size()
    requests, columns = (0, 0) if table is None else table.shape
    return {
        "state_cache": cache,
        "state_table": table,
        "requests": requests,
        "columns": columns,
        "table_stride": 0 if table is None else stride_in_use(table, 0),
        "num_state_pages": pages,
        "state_page_size": page_size,
        "state_page_stride": page_stride // unit,
        "state_token_stride": token_stride // unit,
    }, unit


class States(NamedTuple):
    """The paged states. Strides are in units of the cache's alignment."""

    cache: Any
    table: Any
    requests: Any
    columns: Any
    num_pages: Any
    page_size: Any
    page_stride: Any
    token_stride: Any
    table_stride: Any


@kernel(by_element=("request_ids", "positions", "slot_mapping", "state_table"))
def compress_kernel(
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
    requests: tl.int64,
    columns: tl.int64,
    num_state_pages: tl.int64,
    state_page_size: tl.int64,
    state_page_stride: tl.int64,
    state_token_stride: tl.int64,
    table_stride: tl.int64,
    eps: tl.float32,
    num_tokens: tl.int64,
    window: tl.int32,
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
    KV_UNIT: tl.constexpr,
    SCORE_UNIT: tl.constexpr,
    STATE_UNIT: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LANES: tl.constexpr,
    MAX_WINDOW: tl.constexpr,
):
    """The groups that end among ``window`` tokens, one after the other: of consecutive tokens hardly more than one."""
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
    ROWS: tl.constexpr = RATIO * (1 + OVERLAPS)
    lane = tl.arange(0, MAX_WINDOW)
    first = tl.program_id(0).to(tl.int64) * window
    looked_at = (lane < window) & (first + lane < num_tokens)
    ends = tl.load(positions + (first + lane) * position_stride, mask=looked_at, other=-1).to(tl.int64)
    finishes = looked_at & (ends >= 0) & ((ends + 1) % RATIO == 0)
    found = tl.min(tl.where(finishes, lane, MAX_WINDOW), axis=0)
    column = tl.arange(0, D)
    dealt = tl.arange(0, LANES)[:, None] + tl.arange(0, BLOCK_T)[None, :] * LANES  # [LANES, BLOCK_T]
    while found < MAX_WINDOW:
        token = first + found
        end = tl.load(positions + token * position_stride).to(tl.int64)
        request = tl.load(request_ids + token * id_stride).to(tl.int64)
        slot = tl.load(slot_mapping + token * slot_stride).to(tl.int64)
        valid = (slot >= 0) & (slot < num_slots) & (request >= 0)
        if state_table is not None:
            valid = valid & (request < requests)
        if valid:
            largest = tl.full([LANES, D], float("-inf"), tl.float32)
            total = tl.zeros([LANES, D], tl.float32)
            acc = tl.zeros([LANES, D], tl.float32)
            for begin in range(0, ROWS, BLOCK_T * LANES):
                row = begin + dealt
                values, scores = load_rows(
                    kv,
                    score,
                    ape,
                    request_ids,
                    states,
                    request,
                    token,
                    end,
                    row,
                    column,
                    id_stride,
                    kv_stride,
                    score_stride,
                    ape_stride,
                    D,
                    RATIO,
                    OVERLAPS,
                    KV_UNIT,
                    SCORE_UNIT,
                    STATE_UNIT,
                    INTERPRETED,
                )
                # The softmax of a channel over its rows; a block without any row leaves all as it is.
                new_largest = tl.maximum(largest, tl.max(scores, axis=1))
                base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
                alpha = tl.exp(largest - base)
                weights = tl.exp(scores - base[:, None, :])
                total = total * alpha + tl.sum(weights, axis=1)
                acc = acc * alpha + tl.sum(weights * values, axis=1)
                largest = new_largest
            base = tl.max(largest, axis=0)
            base = tl.where(base == float("-inf"), 0.0, base)
            alpha = tl.exp(largest - base[None, :])
            x = tl.sum(acc * alpha, axis=0) / tl.sum(total * alpha, axis=0)
            gain = widen(tl.load(weight + column), INTERPRETED)
            x = x * tl.rsqrt(tl.sum(x * x, axis=0) / D + eps) * gain
            x = rotate_tail(x[None, :], cos_sin, end + 1 - RATIO, num_positions, 1, D, ROPE)
            page, offset = page_and_offset(slot, valid, page_size, WIDE)
            place = Place(cache, page_stride, row_stride, page_size, page, offset, valid)
            store_row(x, place, D, FORMAT, UNIT, NATIVE, INTERPRETED)
        found = tl.min(tl.where(finishes & (lane > found), lane, MAX_WINDOW), axis=0)


@triton.jit
def load_rows(
    kv,
    score,
    ape,
    request_ids,
    states,
    request,
    token,
    end,
    row,
    column,
    id_stride,
    kv_stride,
    score_stride,
    ape_stride,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAPS: tl.constexpr,
    KV_UNIT: tl.constexpr,
    SCORE_UNIT: tl.constexpr,
    STATE_UNIT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Values and scores [LANES, BLOCK_T, D] of these rows of a group's sum; 0 and -inf of a row that is not there."""
    ROWS: tl.constexpr = RATIO * (1 + OVERLAPS)
    WIDTH: tl.constexpr = D * (1 + OVERLAPS)
    back = ROWS - 1 - row
    position = end - back
    visible = (row < ROWS) & (position >= 0)
    its_token = token - back
    there = visible & (its_token >= 0)
    is_new = there & (tl.load(request_ids + its_token * id_stride, mask=there, other=-1).to(tl.int64) == request)
    # The group before gives the first half of its numbers, the group itself the second.
    half = tl.where(row >= RATIO, D, 0) if OVERLAPS else row * 0
    at = half[:, :, None] + column[None, None, :]
    new = is_new[:, :, None] & (column < D)[None, None, :]
    values = tl.load(kv + (its_token * kv_stride)[:, :, None] * KV_UNIT + at, mask=new, other=0.0)
    scores = tl.load(score + (its_token * score_stride)[:, :, None] * SCORE_UNIT + at, mask=new, other=0.0)
    bias = tl.load(ape + (row % RATIO)[:, :, None] * ape_stride + at, mask=new, other=0.0)
    values, scores = widen(values, INTERPRETED), widen(scores, INTERPRETED) + bias
    if states.cache is not None:
        wanted = visible & (is_new == 0)
        address, found = locate_state(states, request, position, wanted, STATE_UNIT)
        old = found[:, :, None] & (column < D)[None, None, :]
        source = states.cache + address[:, :, None] + at
        values = tl.where(new, values, tl.load(source, mask=old, other=0.0))
        scores = tl.where(new, scores, tl.load(source + WIDTH, mask=old, other=float("-inf")))
    else:
        scores = tl.where(new, scores, float("-inf"))
    return values, scores


@triton.jit
def locate_state(states, request, position, wanted, STATE_UNIT: tl.constexpr):
    """Where in the cache the states of these positions begin, and which of those that are wanted are there."""
    wanted = wanted & (position < 2**31)
    # Divisions of 64 bits took longer than the row's bytes.
    short, page_size = tl.where(wanted, position, 0).to(tl.uint32), states.page_size.to(tl.uint32)
    column = short // page_size
    offset = (short - column * page_size).to(tl.int64)
    entry = states.table + request * states.table_stride + (column % states.columns.to(tl.uint32)).to(tl.int64)
    page = tl.load(entry, mask=wanted, other=-1).to(tl.int64)
    found = wanted & (page >= 0) & (page < states.num_pages)
    # A selection by ``found`` here is one that Triton 3.6 fails to lay out.
    page = tl.minimum(tl.maximum(page, 0), states.num_pages - 1)
    return (page * states.page_stride + offset * states.token_stride) * STATE_UNIT, found


@kernel(by_element=("request_ids", "positions", "state_table"))
def save_state_kernel(
    kv,
    score,
    ape,
    request_ids,
    positions,
    state_cache,
    state_table,
    requests: tl.int64,
    columns: tl.int64,
    num_state_pages: tl.int64,
    state_page_size: tl.int64,
    state_page_stride: tl.int64,
    state_token_stride: tl.int64,
    table_stride: tl.int64,
    num_tokens: tl.int64,
    id_stride: tl.int64,
    position_stride: tl.int64,
    kv_stride: tl.int64,
    score_stride: tl.int64,
    ape_stride: tl.int64,
    WIDTH: tl.constexpr,
    RATIO: tl.constexpr,
    KV_UNIT: tl.constexpr,
    SCORE_UNIT: tl.constexpr,
    STATE_UNIT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token's state, unless a later token of the same call will lie there."""
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ids + token * id_stride).to(tl.int64)
    position = tl.load(positions + token * position_stride).to(tl.int64)
    later = token + columns * state_page_size
    later_request = tl.load(request_ids + later * id_stride, mask=later < num_tokens, other=-1).to(tl.int64)
    saved = (request >= 0) & (request < requests) & (position >= 0) & (later_request != request)
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
    # Of a long prefill hardly any token is saved: the others leave before they look for their place.
    if saved:
        address, found = locate_state(states, request, position, saved, STATE_UNIT)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = found & (column < WIDTH)
        values = tl.load(kv + token * kv_stride * KV_UNIT + column, mask=inside, other=0.0)
        scores = tl.load(score + token * score_stride * SCORE_UNIT + column, mask=inside, other=0.0)
        bias = tl.load(ape + (position % RATIO) * ape_stride + column, mask=inside, other=0.0)
        row = state_cache + address
        tl.store(row + column, widen(values, INTERPRETED), mask=inside)
        tl.store(row + WIDTH + column, widen(scores, INTERPRETED) + bias, mask=inside)
