"""The sums of completed groups: a softmax over the rows of a group in each channel, and the weighted sum."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.dependent_launch import gdc_launch_dependents
from flashlatte.kernels.triton.fp8 import to_float32
from flashlatte.ops.compress.portable.finish import finish_row, finished_in, load_finish, next_of
from flashlatte.ops.compress.portable.operands import RowTarget, States, Tokens, locate_state
from flashlatte.runtime.triton_kernel import kernel


class FinishedGroup(NamedTuple):
    """A group that ends in this call.

    Attributes:
        kv, score: rows of its last token.
        request, end: that token's request and position.
        num_new: number of its last rows that are tokens of this call.
    """

    kv: Any
    score: Any
    request: Any
    end: Any
    num_new: Any


@kernel
def compress_sum_kernel(
    tokens: Tokens,
    states: States,
    target: RowTarget,
    sums,
    first_token: tl.int64,
    num_tokens: tl.int64,
    window: tl.int32,
    FORM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LANES: tl.constexpr,
    ADJACENT: tl.constexpr,
    MAX_WINDOW: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Sum some columns of the groups that end among ``window`` tokens, one group after another.

    Usually at most one token of a window completes a group. A program with all columns finishes the row; else it writes
    ``sums``, float32 [tokens from first_token on, D].
    """
    if OVERLAPPED:
        gdc_launch_dependents()
    D: tl.constexpr = FORM.head_dim
    ROWS: tl.constexpr = FORM.ratio * (1 + FORM.overlaps)
    lane = tl.arange(0, MAX_WINDOW)
    first = first_token + tl.program_id(0).to(tl.int64) * window
    in_window = (lane < window) & (first + lane < num_tokens)
    finishes = finished_in(tokens, states, first, in_window, lane, target.num_slots, FORM.ratio)
    found = next_of(finishes, lane, -1, MAX_WINDOW)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column = tl.max_contiguous(tl.multiple_of(column, ADJACENT), ADJACENT)
    row = tl.arange(0, LANES)[:, None] + tl.arange(0, BLOCK_T)[None, :] * LANES  # [LANES, BLOCK_T]
    while found < MAX_WINDOW:
        token = first + found
        end = tl.load(tokens.positions + token * tokens.position_stride).to(tl.int64)
        request = tl.load(tokens.request_ids + token * tokens.id_stride).to(tl.int64)
        group = FinishedGroup(
            tokens.kv + token * tokens.kv_stride * tokens.kv_align,
            tokens.score + token * tokens.score_stride * tokens.score_align,
            request,
            end,
            count_new(tokens, token, request, end, ROWS),
        )
        if sums is None:
            # Loaded before the rows: after them, there would be a second wait for memory.
            finish = load_finish(target, end, FORM)
        row_max, row_sum, acc = partial_softmax(group, tokens, states, row, column, FORM)
        for begin in range(BLOCK_T * LANES, ROWS, BLOCK_T * LANES):
            # A block without valid rows changes nothing.
            block_max, block_sum, block_acc = partial_softmax(group, tokens, states, begin + row, column, FORM)
            previous_max, row_max = row_max, tl.maximum(row_max, block_max)
            base = tl.where(row_max == float("-inf"), 0.0, row_max)
            alpha, block_alpha = tl.exp(previous_max - base), tl.exp(block_max - base)
            row_sum = row_sum * alpha + block_sum * block_alpha
            acc = acc * alpha + block_acc * block_alpha
        if LANES > 1:
            base = tl.max(row_max, axis=0)
            base = tl.where(base == float("-inf"), 0.0, base)
            alpha = tl.exp(row_max - base[None, :])
            row_sum *= alpha
            acc *= alpha
        x = tl.sum(acc, axis=0) / tl.sum(row_sum, axis=0)
        if sums is None:
            finish_row(x, tokens, token, finish, target, FORM)
        else:
            tl.store(sums + (token - first_token) * D + column, x)
        found = next_of(finishes, lane, found, MAX_WINDOW)


@triton.jit
def count_new(tokens, token, request, end, ROWS: tl.constexpr):
    """The number of rows of the group that ends with ``token`` that are tokens of this call. They are its last rows, as
    a request's tokens are consecutive; the others are in the states."""
    back = tl.arange(0, triton.next_power_of_2(ROWS))
    in_call = (back < ROWS) & (back <= end) & (back <= token)
    request_id = tl.load(tokens.request_ids + (token - back) * tokens.id_stride, mask=in_call, other=-1).to(tl.int64)
    return tl.min(tl.where(in_call & (request_id == request), ROWS, back), axis=0)


@triton.jit
def partial_softmax(group, tokens, states, row, column, FORM: tl.constexpr):
    """For rows [LANES, BLOCK_T] of a group, the row_max, the row_sum and the weighted sum of values of each lane
    [LANES, COLUMNS]; -inf, 0 and 0 for a lane without rows."""
    D: tl.constexpr = FORM.head_dim
    ROWS: tl.constexpr = FORM.ratio * (1 + FORM.overlaps)
    WIDTH: tl.constexpr = D * (1 + FORM.overlaps)
    back = ROWS - 1 - row
    is_new = (row < ROWS) & (back < group.num_new)
    # The preceding group contributes the first half of its elements, the group itself the second.
    half = tl.where(row >= FORM.ratio, D, 0) if FORM.overlaps else row * 0
    columns = half[:, :, None] + column[None, None, :]
    kv_rows = group.kv - back * tokens.kv_stride * tokens.kv_align
    score_rows = group.score - back * tokens.score_stride * tokens.score_align
    bias_rows = tokens.ape + (row % FORM.ratio) * tokens.ape_stride * tokens.ape_align
    # If dtypes allow it, a single load with selected addresses keeps more loads in flight than two loads and a
    # selection.
    ALIKE: tl.constexpr = tokens.kv.dtype.element_ty == tl.float32
    exists = is_new
    if states.start is not None and ALIKE:
        # In a prefill, few groups need states.
        needs_states = group.num_new < tl.minimum(group.end + 1, ROWS)
        if needs_states:
            state, is_old = state_rows(group, states, row, back, is_new, ROWS)
            kv_rows = tl.where(is_old, state, kv_rows)
            score_rows = tl.where(is_old, state + WIDTH, score_rows)
            exists = is_new | is_old
    mask = exists[:, :, None]
    values = to_float32(tl.load(kv_rows[:, :, None] + columns, mask=mask, other=0.0))
    scores = to_float32(tl.load(score_rows[:, :, None] + columns, mask=mask, other=float("-inf")))
    scores += tl.load(bias_rows[:, :, None] + columns, mask=is_new[:, :, None], other=0.0)
    if states.start is not None and not ALIKE:
        needs_states = group.num_new < tl.minimum(group.end + 1, ROWS)
        if needs_states:
            state, is_old = state_rows(group, states, row, back, is_new, ROWS)
            old = is_old[:, :, None]
            values = tl.where(old, tl.load(state[:, :, None] + columns, mask=old, other=0.0), values)
            scores = tl.where(old, tl.load(state[:, :, None] + WIDTH + columns, mask=old, other=0.0), scores)
    row_max = tl.max(scores, axis=1)
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    p = tl.exp(scores - base[:, None, :])
    return row_max, tl.sum(p, axis=1), tl.sum(p * values, axis=1)


@triton.jit
def state_rows(group, states, row, back, is_new, ROWS: tl.constexpr):
    """Pointers to the states of rows that are not tokens of this call, and whether they exist."""
    wanted = (row < ROWS) & (back <= group.end) & (is_new == 0)
    return locate_state(states, group.request, group.end - back, wanted)
