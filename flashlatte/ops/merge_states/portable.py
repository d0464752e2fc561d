"""The merge in Triton: strided states are read in place, each value once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import as_bytes
from flashlatte.kernels.triton.fp8 import converts_e4m3, float_to_e4m3, from_float32, to_float32
from flashlatte.runtime import machine
from flashlatte.runtime.triton_kernel import kernel

MAX_PARTS = 8  # of one launch
MAX_AXES = 3  # leading axes that a kernel tells apart
SCRATCH_BYTES = 64 * 2**20
VECTOR_BYTES = 16
TILE = 2048
MAX_COLUMNS = 1024
NUM_WARPS = 4


def merge_states_into(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    context_tensor: torch.Tensor | None,
    context_tokens: int | None,
    scale_tensor: torch.Tensor | None,
    scale_value: float,
) -> None:
    if lse.numel() > 0:
        states = [MergeState(*state) for state in zip(outs, lses, strict=True)]
        options = MergeOptions(context_tensor, context_tokens, scale_tensor, scale_value)
        _merge(states, MergeState(as_bytes(out), lse), options)


class MergeOptions(NamedTuple):
    """Options of a merge.

    Attributes:
        context_tensor, context_tokens: entries of the first axis from this index on are copied from the last state: a
            tensor, or a number. Both None: all entries are merged.
        scale_tensor, scale_value: scale of an e4m3 output.
        first_token: index of the first entry of the current slice of the first axis.
        has_last: whether the current states include the last of all.
    """

    context_tensor: torch.Tensor | None
    context_tokens: int | None
    scale_tensor: torch.Tensor | None
    scale_value: float
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
        here = [*of_outs, *of_lses]
        if sizes and all(outer == size * inner for outer, inner in zip(strides[-1], here, strict=True)):
            sizes[-1] *= size
            strides[-1] = here
        else:
            sizes.append(size)
            strides.append(here)
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
    walks = []
    for number in range(len(every)):
        walks += [axis[number] // unit for axis in row_strides]
        walks += [axis[len(every) + number] for axis in axes.strides]
        walks.append(columns[number])
    num_rows = math.prod(axes.sizes)
    num_tokens = target.lse.shape[0] if target.lse.dim() else 1
    block_d = min(1 << max(d - 1, 0).bit_length(), MAX_COLUMNS)
    block_r = max(TILE // block_d, 1)
    merge_kernel[(-(-num_rows // block_r),)](
        outs=tuple(state.out for state in every),
        lses=tuple(state.lse for state in every),
        first_row_sum=states[0].row_sum,
        merged_row_sum=target.row_sum,
        context_tensor=options.context_tensor,
        scale_tensor=options.scale_tensor,
        # Triton specialises integers of a tuple that are 1 or divisible by 16; odd integers from 3 on are not
        # specialised.
        walks=tuple(2 * walk + 3 for walk in walks),
        num_rows=num_rows,
        size_1=axes.sizes[1] if len(axes.sizes) > 1 else 1,
        size_2=axes.sizes[2] if len(axes.sizes) > 2 else 1,
        context_tokens=options.context_tokens or 0,
        first_token=options.first_token,
        num_tokens=num_tokens,
        rows_per_token=num_rows // num_tokens,
        scale_value=options.scale_value,
        D=d,
        PARTS=len(states),
        AXES=len(axes.sizes),
        ALIGN=unit,
        CONTIGUOUS=contiguous,
        WIDE=num_rows >= 2**31,
        LIMITED=options.context_tensor is not None or options.context_tokens is not None,
        HAS_LAST=options.has_last,
        NATIVE=converts_e4m3(target.out.device),
        INTERPRETED=machine.interpreting(),
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        num_warps=NUM_WARPS,
    )


@triton.jit
def _offsets(index, walks, FIRST: tl.constexpr, AXES: tl.constexpr):
    """Offsets of rows at ``index`` (a coordinate per axis), with the AXES strides from walks[FIRST] on."""
    offsets = index[0].to(tl.int64) * _stride(walks[FIRST])
    for axis in tl.static_range(1, AXES):
        offsets += index[axis].to(tl.int64) * _stride(walks[FIRST + axis])
    return offsets


@triton.jit
def _tile_offsets(
    index, columns, walks, FIRST: tl.constexpr, AXES: tl.constexpr, ALIGN: tl.constexpr, CONTIGUOUS: tl.constexpr
):
    """Offsets of ``columns`` [1, BLOCK_D] of the rows at ``index``, for a tensor whose strides begin at
    walks[FIRST]."""
    within_row = columns if CONTIGUOUS else columns * _stride(walks[FIRST + 2 * AXES])
    return (_offsets(index, walks, FIRST, AXES) * ALIGN)[:, None] + within_row


@triton.jit
def _stride(walk):
    return (walk.to(tl.int64) - 3) >> 1


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


@kernel
def merge_kernel(
    outs,
    lses,
    first_row_sum,
    merged_row_sum,
    context_tensor,
    scale_tensor,
    walks,
    num_rows: tl.int64,
    size_1: tl.int64,
    size_2: tl.int64,
    context_tokens: tl.int64,
    first_token: tl.int64,
    num_tokens: tl.int64,
    rows_per_token: tl.int64,
    scale_value: tl.float32,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    AXES: tl.constexpr,
    ALIGN: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    WIDE: tl.constexpr,
    LIMITED: tl.constexpr,
    HAS_LAST: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """outs[PARTS] and lses[PARTS] are the outputs; ``first_row_sum`` of outs[0] and ``merged_row_sum`` of the output
    have the strides of their lses, or are None (``MergeState``).

    ``walks`` are, for each part and then for the outputs, 2s + 3 of the strides s of out's leading axes (in units
    of ALIGN elements), of lse's axes and of out's last axis. LIMITED: tokens from ``context_tokens`` on, of
    ``rows_per_token`` rows each, are the last of all parts as it is, which is the last one here if HAS_LAST.
    """
    WALK: tl.constexpr = 2 * AXES + 1
    LAST: tl.constexpr = PARTS - 1
    COPIES: tl.constexpr = LIMITED and HAS_LAST
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_use = rows < num_rows
    has_context = in_use
    if LIMITED:
        if context_tensor is not None:
            context_tokens = tl.load(context_tensor).to(tl.int64)
        # Clamped before the multiplication, because the tensor may have any value.
        context_tokens = tl.minimum(tl.maximum(context_tokens, first_token) - first_token, num_tokens)
        has_context = in_use & (rows < context_tokens * rows_per_token)
    # Rows [BLOCK_R] that are copied from the last state.
    copied = in_use & ~has_context
    if not WIDE:
        rows = rows.to(tl.int32)
        size_1 = size_1.to(tl.int32)
        size_2 = size_2.to(tl.int32)
    if AXES == 1:
        index = (rows,)
    elif AXES == 2:
        index = (rows // size_1, rows % size_1)
    else:
        index = (rows // size_2 // size_1, rows // size_2 % size_1, rows % size_2)

    # [BLOCK_R]
    maximum = tl.full([BLOCK_R], float("-inf"), tl.float32)
    for part in tl.static_range(PARTS):
        counts = in_use if HAS_LAST and part == LAST else has_context
        part_lse = _load_lse(lses[part], _offsets(index, walks, part * WALK + AXES, AXES), counts)
        maximum = tl.maximum(maximum, part_lse)
    # If all states are empty, -inf - -inf would be NaN.
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.zeros([BLOCK_R], tl.float32)
    for part in tl.static_range(PARTS):
        lse_offsets = _offsets(index, walks, part * WALK + AXES, AXES)
        counts = in_use if HAS_LAST and part == LAST else has_context
        part_lse = _load_lse(lses[part], lse_offsets, counts)
        total += _weight(part_lse, maximum, first_row_sum, lse_offsets, in_use, part)
    all_empty = total == 0.0
    total = tl.where(all_empty, 1.0, total)
    if COPIES:
        total = tl.where(copied, 1.0, total)

    OUT_WALK: tl.constexpr = PARTS * WALK
    OUT_TYPE: tl.constexpr = outs[PARTS].dtype.element_ty
    for first in tl.static_range(0, D, BLOCK_D):
        columns = first + tl.arange(0, BLOCK_D)[None, :]
        merged = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        for part in tl.static_range(PARTS):
            lse_offsets = _offsets(index, walks, part * WALK + AXES, AXES)
            counts = in_use if HAS_LAST and part == LAST else has_context
            part_lse = _load_lse(lses[part], lse_offsets, counts)
            weight = _weight(part_lse, maximum, first_row_sum, lse_offsets, in_use, part)
            offsets = _tile_offsets(index, columns, walks, part * WALK, AXES, ALIGN, CONTIGUOUS)
            # The out of an empty state is not read: it may be NaN.
            used = in_use & (part_lse != float("-inf"))
            if COPIES and part == LAST:
                weight = tl.where(copied, 1.0, weight)
                used |= copied
            used = used[:, None] & (columns < D)
            values = to_float32(tl.load(outs[part] + offsets, mask=used, other=0.0), INTERPRETED)
            merged += (weight / total)[:, None] * values
        offsets = _tile_offsets(index, columns, walks, OUT_WALK, AXES, ALIGN, CONTIGUOUS)
        written = in_use[:, None] & (columns < D)
        if outs[PARTS].dtype.element_ty == tl.uint8:
            scale = scale_value if scale_tensor is None else tl.load(scale_tensor)
            rounded = float_to_e4m3(merged * tl.div_rn(1.0, scale), NATIVE)
        else:
            rounded = from_float32(merged, OUT_TYPE, INTERPRETED)
        tl.store(outs[PARTS] + offsets, rounded, mask=written)

    if COPIES:
        last_lse = tl.load(lses[LAST] + _offsets(index, walks, LAST * WALK + AXES, AXES), mask=copied, other=0.0)
    # When merging in place, another warp may still read the lse that this one overwrites.
    tl.debug_barrier()
    lse_offsets = _offsets(index, walks, OUT_WALK + AXES, AXES)
    if merged_row_sum is None:
        maximum += tl.log(total)
    else:
        tl.store(merged_row_sum + lse_offsets, total, mask=in_use)
    merged_lse = tl.where(all_empty, float("-inf"), maximum)
    if COPIES:
        merged_lse = tl.where(copied, last_lse, merged_lse)
    tl.store(lses[PARTS] + lse_offsets, merged_lse, mask=in_use)
