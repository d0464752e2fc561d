"""The merge in Triton: strided states are read in place, each value once."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import as_bytes
from flashlatte.kernels.triton.fp8 import converts_e4m3, float_to_e4m3, from_float32, to_float32
from flashlatte.ops.merge_states.reference import MergeStatesParams
from flashlatte.runtime.kernel_records import Int64, Pointer
from flashlatte.runtime.triton_kernel import kernel

MAX_PARTS = 8  # of one launch
MAX_AXES = 3  # leading axes that a launch supports
SCRATCH_BYTES = 64 * 2**20
VECTOR_BYTES = 16
TILE = 2048
MAX_COLUMNS = 1024
NUM_WARPS = 4


def merge_states_into(params: MergeStatesParams) -> None:
    if params.lse.numel() > 0:
        states = [MergeState(*state) for state in zip(params.outs, params.lses, strict=True)]
        _merge(states, MergeState(as_bytes(params.out), params.lse), MergeOptions(params))


class MergeOptions(NamedTuple):
    """The part of a merge that a launch computes.

    Attributes:
        params: the arguments of the call.
        first_token: index of the first entry of the current slice of the first axis.
        has_last: whether the current states include the last of all.
    """

    params: MergeStatesParams
    first_token: int = 0
    has_last: bool = True


class MergeState(NamedTuple):
    """An attention result [..., d] with total weight ``row_sum`` · e^``lse`` ([...]); None means a row_sum of 1.

    If more states are merged than one launch supports, intermediate results have a ``row_sum``: added to a large lse
    (such as 5,000), log(row_sum) would lose most of its bits.
    """

    out: torch.Tensor
    lse: torch.Tensor
    row_sum: torch.Tensor | None = None

    def narrow(self, axis: int, start: int, length: int) -> MergeState:
        return MergeState(*(None if tensor is None else tensor.narrow(axis, start, length) for tensor in self))


def _merge(states: Sequence[MergeState], target: MergeState, options: MergeOptions) -> None:
    """Merge into ``target``. The first state and the target may have a ``row_sum``, strided like their lse."""
    axes = _fused_axes([*states, target])
    elements = target.out.numel() + 2 * target.lse.numel()
    if len(axes.sizes) > MAX_AXES:
        shape = target.lse.shape
        _merge_halves(states, target, min((size, axis) for axis, size in enumerate(shape) if size > 1)[1], options)
    elif len(states) <= MAX_PARTS:
        _launch(states, target, axes, options)
    elif target.lse.numel() > 1 and 4 * elements > SCRATCH_BYTES:
        _merge_halves(states, target, target.lse.shape.index(max(target.lse.shape)), options)
    else:
        _fold(states, target, options)


def _merge_halves(states: Sequence[MergeState], target: MergeState, axis: int, options: MergeOptions) -> None:
    half = target.lse.shape[axis] // 2
    for start, length in ((0, half), (half, target.lse.shape[axis] - half)):
        part = options._replace(first_token=options.first_token + (start if axis == 0 else 0))
        _merge([state.narrow(axis, start, length) for state in states], target.narrow(axis, start, length), part)


def _fold(states: Sequence[MergeState], target: MergeState, options: MergeOptions) -> None:
    """Merge more states than one launch supports: the intermediate result, in float32, is the first state of the next
    launch."""
    out, lse = target.out, target.lse
    merged = MergeState(
        torch.empty(out.shape, dtype=torch.float32, device=out.device),
        torch.empty(lse.shape, dtype=torch.float32, device=out.device),
        torch.empty(lse.shape, dtype=torch.float32, device=out.device),
    )
    before_last = options._replace(has_last=False)
    _merge(states[:MAX_PARTS], merged, before_last)
    for start in range(MAX_PARTS, len(states), MAX_PARTS - 1):
        stop = start + MAX_PARTS - 1
        ends = stop >= len(states)
        _merge([merged, *states[start:stop]], target if ends else merged, options if ends else before_last)


class Axes(NamedTuple):
    """Leading axes: their sizes, and the strides of all states for each axis, first of out, then of lse."""

    sizes: list[int]
    strides: list[list[int]]


def _fused_axes(states: Sequence[MergeState]) -> Axes:
    """The leading axes of states, where adjacent axes are fused if the strides of all tensors allow it."""
    out_strides = zip(*(state.out.stride()[:-1] for state in states), strict=True)
    lse_strides = zip(*(state.lse.stride() for state in states), strict=True)
    sizes: list[int] = []
    strides: list[list[int]] = []
    for size, of_outs, of_lses in zip(states[0].lse.shape, out_strides, lse_strides, strict=True):
        if size == 1:
            continue
        of_axis = [*of_outs, *of_lses]
        if sizes and all(outer == size * inner for outer, inner in zip(strides[-1], of_axis, strict=True)):
            sizes[-1] *= size
            strides[-1] = of_axis
        else:
            sizes.append(size)
            strides.append(of_axis)
    return Axes(sizes, strides) if sizes else Axes([1], [[0] * (2 * len(states))])


def _launch(states: Sequence[MergeState], target: MergeState, axes: Axes, options: MergeOptions) -> None:
    every = [*states, target]
    d = target.out.shape[-1]
    columns = [state.out.stride(-1) for state in every] if d > 1 else [1] * len(every)
    contiguous = all(stride == 1 for stride in columns)
    row_strides = [axis[: len(every)] for axis in axes.strides]
    unit = 1
    if contiguous:
        unit = math.gcd(VECTOR_BYTES // target.out.element_size(), *(stride for axis in row_strides for stride in axis))
    strides = []
    for number in range(len(every)):
        strides += [axis[number] // unit for axis in row_strides]
        strides += [axis[len(every) + number] for axis in axes.strides]
        strides.append(columns[number])
    num_rows = math.prod(axes.sizes)
    num_tokens = target.lse.shape[0] if target.lse.dim() else 1
    block_d = min(1 << max(d - 1, 0).bit_length(), MAX_COLUMNS)
    block_r = max(TILE // block_d, 1)
    params, sizes = options.params, [*axes.sizes, 1, 1]
    context = MergeContext(
        context_tensor=params.context_tensor,
        context_tokens=params.context_tokens or 0,
        first_token=options.first_token,
        num_tokens=num_tokens,
        rows_per_token=num_rows // num_tokens,
    )
    config = MergeConfig(
        d=d,
        parts=len(states),
        axes=len(axes.sizes),
        align=unit,
        contiguous=contiguous,
        wide=num_rows >= 2**31,
        limited=params.context_tensor is not None or params.context_tokens is not None,
        has_last=options.has_last,
        native=converts_e4m3(target.out.device),
        block_r=block_r,
        block_d=block_d,
    )
    merge_kernel[(-(-num_rows // block_r),)](
        MergeRows(num_rows, sizes[1], sizes[2]),
        context,
        outs=tuple(state.out for state in every),
        lses=tuple(state.lse for state in every),
        first_row_sum=states[0].row_sum,
        merged_row_sum=target.row_sum,
        # Triton specializes integers of a tuple that are 1 or divisible by 16; odd integers from 3 on are not
        # specialized.
        strides=tuple(2 * stride + 3 for stride in strides),
        scale_tensor=params.scale_tensor,
        scale_value=params.scale_value,
        CONFIG=config,
        num_warps=NUM_WARPS,
    )


class MergeRows(NamedTuple):
    """The number of rows, and the sizes of their second and third axes."""

    count: Int64
    size_1: Int64
    size_2: Int64


class MergeContext(NamedTuple):
    """The rows that are merged if MergeConfig.limited: those of tokens below ``context_tokens`` (or the value of
    ``context_tensor``), of ``rows_per_token`` rows each. The launch has tokens from ``first_token`` on."""

    context_tensor: Pointer
    context_tokens: Int64
    first_token: Int64
    num_tokens: Int64
    rows_per_token: Int64


class MergeConfig(NamedTuple):
    """The constants of a launch.

    Attributes:
        d: columns of out.
        parts: number of states.
        axes: leading axes.
        align: unit of the strides of out, in elements.
        contiguous: whether the last axis of every out has stride 1.
        wide: whether row numbers may exceed 2^31.
        limited, has_last: as in ``MergeContext`` and ``MergeOptions``.
        native: the GPU has e4m3 conversion instructions.
        block_r, block_d: rows and columns of a tile.
    """

    d: int
    parts: int
    axes: int
    align: int
    contiguous: bool
    wide: bool
    limited: bool
    has_last: bool
    native: bool
    block_r: int
    block_d: int


@triton.jit
def _offsets(index, strides, FIRST: tl.constexpr, AXES: tl.constexpr):
    """Offsets of rows at ``index`` (a coordinate per axis), with the AXES strides from strides[FIRST] on."""
    offsets = index[0].to(tl.int64) * _stride(strides[FIRST])
    for axis in tl.static_range(1, AXES):
        offsets += index[axis].to(tl.int64) * _stride(strides[FIRST + axis])
    return offsets


@triton.jit
def _tile_offsets(index, columns, strides, FIRST: tl.constexpr, config: tl.constexpr):
    """Offsets of ``columns`` [1, BLOCK_D] of the rows at ``index``, for a tensor whose strides begin at
    strides[FIRST]."""
    within_row = columns if config.contiguous else columns * _stride(strides[FIRST + 2 * config.axes])
    return (_offsets(index, strides, FIRST, config.axes) * config.align)[:, None] + within_row


@triton.jit
def _stride(encoded):
    return (encoded.to(tl.int64) - 3) >> 1


@triton.jit
def _load_lse(lse, offsets, in_use):
    """The lse of a state, -inf if the state is empty."""
    value = tl.load(lse + offsets, mask=in_use, other=float("-inf"))
    return tl.where(value == float("inf"), float("-inf"), value)


@triton.jit
def _weight(part_lse, maximum, row_sum, offsets, in_use, PART: tl.constexpr):
    """The weight of a state relative to e^maximum; ``row_sum`` is that of state 0, or None."""
    weight = tl.exp(part_lse - maximum)
    if PART == 0 and row_sum is not None:
        weight *= tl.load(row_sum + offsets, mask=in_use, other=0.0)
    return weight


@triton.jit
def _rows_with_context(rows, in_use, context, LIMITED: tl.constexpr):
    """The mask of rows [BLOCK_R] that are merged, not copied from the last state."""
    if LIMITED:
        tokens = context.context_tokens
        if context.context_tensor is not None:
            tokens = tl.load(context.context_tensor).to(tl.int64)
        # Clamped before the multiplication, because the tensor may have any value.
        tokens = tl.minimum(tl.maximum(tokens, context.first_token) - context.first_token, context.num_tokens)
        return in_use & (rows < tokens * context.rows_per_token)
    else:
        return in_use


@triton.jit
def _coordinates(row, rows, config: tl.constexpr):
    """The coordinate of each row [BLOCK_R] for each axis."""
    size_1 = rows.size_1
    size_2 = rows.size_2
    if not config.wide:
        row = row.to(tl.int32)
        size_1 = size_1.to(tl.int32)
        size_2 = size_2.to(tl.int32)
    if config.axes == 1:
        return (row,)
    elif config.axes == 2:
        return row // size_1, row % size_1
    else:
        return row // size_2 // size_1, row // size_2 % size_1, row % size_2


@kernel
def merge_kernel(
    rows: MergeRows,
    context: MergeContext,
    outs,
    lses,
    first_row_sum,
    merged_row_sum,
    strides,
    scale_tensor,
    scale_value: tl.float32,
    CONFIG: tl.constexpr,
):
    """outs[parts] and lses[parts] are the outputs; ``first_row_sum`` of outs[0] and ``merged_row_sum`` of the output
    have the strides of their lses, or are None (``MergeState``).

    ``strides`` are, for each part and then for the outputs, 2s + 3 of the strides s of out's leading axes (in units of
    CONFIG.align elements), of lse's axes and of out's last axis. Rows without context are copied from the last of all
    parts, which is the last part of this launch if CONFIG.has_last.
    """
    D: tl.constexpr = CONFIG.d
    PARTS: tl.constexpr = CONFIG.parts
    AXES: tl.constexpr = CONFIG.axes
    HAS_LAST: tl.constexpr = CONFIG.has_last
    BLOCK_R: tl.constexpr = CONFIG.block_r
    BLOCK_D: tl.constexpr = CONFIG.block_d
    STRIDES: tl.constexpr = 2 * AXES + 1
    LAST: tl.constexpr = PARTS - 1
    COPIES: tl.constexpr = CONFIG.limited and HAS_LAST
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_use = row < rows.count
    has_context = _rows_with_context(row, in_use, context, CONFIG.limited)
    # Rows [BLOCK_R] that are copied from the last state.
    copied = in_use & ~has_context
    index = _coordinates(row, rows, CONFIG)

    # [BLOCK_R]
    maximum = tl.full([BLOCK_R], float("-inf"), tl.float32)
    for part in tl.static_range(PARTS):
        counts = in_use if HAS_LAST and part == LAST else has_context
        part_lse = _load_lse(lses[part], _offsets(index, strides, part * STRIDES + AXES, AXES), counts)
        maximum = tl.maximum(maximum, part_lse)
    # If all states are empty, -inf - -inf would be NaN.
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    if COPIES:
        # The lse of a copied row may be NaN, which Triton's interpreter propagates.
        maximum = tl.where(copied, 0.0, maximum)
    total = tl.zeros([BLOCK_R], tl.float32)
    for part in tl.static_range(PARTS):
        lse_offsets = _offsets(index, strides, part * STRIDES + AXES, AXES)
        counts = in_use if HAS_LAST and part == LAST else has_context
        part_lse = _load_lse(lses[part], lse_offsets, counts)
        total += _weight(part_lse, maximum, first_row_sum, lse_offsets, in_use, part)
    all_empty = total == 0.0
    total = tl.where(all_empty, 1.0, total)
    if COPIES:
        total = tl.where(copied, 1.0, total)

    OUT_STRIDES: tl.constexpr = PARTS * STRIDES
    OUT_TYPE: tl.constexpr = outs[PARTS].dtype.element_ty
    for first in tl.static_range(0, D, BLOCK_D):
        columns = first + tl.arange(0, BLOCK_D)[None, :]
        merged = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        for part in tl.static_range(PARTS):
            lse_offsets = _offsets(index, strides, part * STRIDES + AXES, AXES)
            counts = in_use if HAS_LAST and part == LAST else has_context
            part_lse = _load_lse(lses[part], lse_offsets, counts)
            weight = _weight(part_lse, maximum, first_row_sum, lse_offsets, in_use, part)
            offsets = _tile_offsets(index, columns, strides, part * STRIDES, CONFIG)
            # The out of an empty state is not read: it may be NaN.
            used = in_use & (part_lse != float("-inf"))
            if COPIES and part == LAST:
                weight = tl.where(copied, 1.0, weight)
                used |= copied
            used = used[:, None] & (columns < D)
            values = to_float32(tl.load(outs[part] + offsets, mask=used, other=0.0))
            merged += (weight / total)[:, None] * values
        offsets = _tile_offsets(index, columns, strides, OUT_STRIDES, CONFIG)
        written = in_use[:, None] & (columns < D)
        if outs[PARTS].dtype.element_ty == tl.uint8:
            scale = scale_value if scale_tensor is None else tl.load(scale_tensor)
            rounded = float_to_e4m3(merged * tl.div_rn(1.0, scale), CONFIG.native)
        else:
            rounded = from_float32(merged, OUT_TYPE)
        tl.store(outs[PARTS] + offsets, rounded, mask=written)

    if COPIES:
        last_lse = tl.load(lses[LAST] + _offsets(index, strides, LAST * STRIDES + AXES, AXES), mask=copied, other=0.0)
    # When merging in place, another warp may still read the lse that this one overwrites.
    tl.debug_barrier()
    lse_offsets = _offsets(index, strides, OUT_STRIDES + AXES, AXES)
    if merged_row_sum is None:
        maximum += tl.log(total)
    else:
        tl.store(merged_row_sum + lse_offsets, total, mask=in_use)
    merged_lse = tl.where(all_empty, float("-inf"), maximum)
    if COPIES:
        merged_lse = tl.where(copied, last_lse, merged_lse)
    tl.store(lses[PARTS] + lse_offsets, merged_lse, mask=in_use)
