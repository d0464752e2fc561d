"""The merge in Triton: parts are read where they lie, each value once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import narrow, widen
from flashlatte.runtime import dispatch
from flashlatte.runtime.triton_kernel import kernel

MAX_PARTS = 8  # of one launch
MAX_AXES = 3  # leading axes that a kernel tells apart
SCRATCH_BYTES = 64 * 2**20
VECTOR_BYTES = 16
TILE = 2048
MAX_COLUMNS = 1024
NUM_WARPS = 4


def merge_states_into(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], out: torch.Tensor, lse: torch.Tensor
) -> None:
    if lse.numel() == 0:
        return
    sizes, strides = _fused_axes(outs, lses, out, lse)
    if len(sizes) > MAX_AXES:
        shortest = min((size, axis) for axis, size in enumerate(lse.shape) if size > 1)[1]
        _merge_halves(outs, lses, out, lse, shortest)
    elif len(outs) <= MAX_PARTS:
        _launch(outs, lses, out, lse, sizes, strides)
    elif lse.numel() > 1 and 4 * (out.numel() + lse.numel()) > SCRATCH_BYTES:
        _merge_halves(outs, lses, out, lse, lse.shape.index(max(lse.shape)))
    else:
        _fold(outs, lses, out, lse)


def _merge_halves(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], out: torch.Tensor, lse: torch.Tensor, axis: int
) -> None:
    half = lse.shape[axis] // 2
    for start, length in ((0, half), (half, lse.shape[axis] - half)):
        merge_states_into(
            [part.narrow(axis, start, length) for part in outs],
            [part.narrow(axis, start, length) for part in lses],
            out.narrow(axis, start, length),
            lse.narrow(axis, start, length),
        )


def _fold(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], out: torch.Tensor, lse: torch.Tensor) -> None:
    """More parts than a launch takes: what is merged so far, in float32, is the first part of the next launch."""
    merged_out = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    merged_lse = torch.empty(lse.shape, dtype=torch.float32, device=out.device)
    merge_states_into(outs[:MAX_PARTS], lses[:MAX_PARTS], merged_out, merged_lse)
    for start in range(MAX_PARTS, len(outs), MAX_PARTS - 1):
        stop = start + MAX_PARTS - 1
        target = (merged_out, merged_lse) if stop < len(outs) else (out, lse)
        merge_states_into([merged_out, *outs[start:stop]], [merged_lse, *lses[start:stop]], *target)


def _fused_axes(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], out: torch.Tensor, lse: torch.Tensor
) -> tuple[list[int], list[list[int]]]:
    """Leading axes, those fused that every tensor can walk as one.

    Returns:
        Their sizes, and for each of them the strides of [*outs, out, *lses, lse].
    """
    out_strides = zip(*(tensor.stride()[:-1] for tensor in (*outs, out)), strict=True)
    lse_strides = zip(*(tensor.stride() for tensor in (*lses, lse)), strict=True)
    sizes: list[int] = []
    strides: list[list[int]] = []
    for size, of_outs, of_lses in zip(lse.shape, out_strides, lse_strides, strict=True):
        if size == 1:
            continue
        here = [*of_outs, *of_lses]
        if sizes and all(outer == size * inner for outer, inner in zip(strides[-1], here, strict=True)):
            sizes[-1] *= size
            strides[-1] = here
        else:
            sizes.append(size)
            strides.append(here)
    return (sizes, strides) if sizes else ([1], [[0] * (len(outs) + len(lses) + 2)])


def _launch(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    sizes: list[int],
    strides: list[list[int]],
) -> None:
    d = out.shape[-1]
    columns = [*(part.stride(-1) for part in outs), out.stride(-1)] if d > 1 else [1] * (len(outs) + 1)
    contiguous = all(stride == 1 for stride in columns)
    row_strides = [axis[: len(outs) + 1] for axis in strides]
    unit = 1
    if contiguous:
        unit = math.gcd(VECTOR_BYTES // out.element_size(), *(stride for axis in row_strides for stride in axis))
    walks = []
    for part in range(len(outs) + 1):
        walks += [axis[part] // unit for axis in row_strides]
        walks += [axis[len(outs) + 1 + part] for axis in strides]
        walks.append(columns[part])
    num_rows = math.prod(sizes)
    block_d = min(1 << max(d - 1, 0).bit_length(), MAX_COLUMNS)
    block_r = max(TILE // block_d, 1)
    merge_kernel[(-(-num_rows // block_r),)](
        (*outs, out),
        (*lses, lse),
        # Triton compiles anew for integers of a tuple that are 1 or divisible by 16; odd ones from 3 on are neither.
        tuple(2 * walk + 3 for walk in walks),
        num_rows,
        sizes[1] if len(sizes) > 1 else 1,
        sizes[2] if len(sizes) > 2 else 1,
        d,
        len(outs),
        len(sizes),
        unit,
        contiguous,
        num_rows >= 2**31,
        dispatch.interpreting(),
        block_r,
        block_d,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )


@triton.jit
def _offsets(index, walks, FIRST: tl.constexpr, AXES: tl.constexpr):
    """Offsets of rows at ``index``, one coordinate an axis, by the AXES strides from walks[FIRST] on."""
    offsets = index[0].to(tl.int64) * _stride(walks[FIRST])
    for axis in tl.static_range(1, AXES):
        offsets += index[axis].to(tl.int64) * _stride(walks[FIRST + axis])
    return offsets


@triton.jit
def _tile_offsets(
    index, columns, walks, FIRST: tl.constexpr, AXES: tl.constexpr, UNIT: tl.constexpr, CONTIGUOUS: tl.constexpr
):
    """Offsets of ``columns`` [1, BLOCK_D] of the rows at ``index``, for a tensor whose walk begins at walks[FIRST]."""
    within_row = columns if CONTIGUOUS else columns * _stride(walks[FIRST + 2 * AXES])
    return (_offsets(index, walks, FIRST, AXES) * UNIT)[:, None] + within_row


@triton.jit
def _stride(walk):
    return (walk.to(tl.int64) - 3) >> 1


@triton.jit
def _load_lse(lse, offsets, in_use):
    """A part's lse, -inf where the part is empty."""
    value = tl.load(lse + offsets, mask=in_use, other=float("-inf"))
    return tl.where(value == float("inf"), float("-inf"), value)


@kernel
def merge_kernel(
    outs,
    lses,
    walks,
    num_rows: tl.int64,
    size_1: tl.int64,
    size_2: tl.int64,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    AXES: tl.constexpr,
    UNIT: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """outs[PARTS] and lses[PARTS] are the outputs.

    ``walks`` are, for each part and then for the outputs, 2s + 3 of the strides s of out's leading axes (in units
    of UNIT numbers), of lse's axes and of out's last axis.
    """
    WALK: tl.constexpr = 2 * AXES + 1
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_use = rows < num_rows
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
        part_lse = _load_lse(lses[part], _offsets(index, walks, part * WALK + AXES, AXES), in_use)
        maximum = tl.maximum(maximum, part_lse)
    # With every part empty this keeps -inf - -inf from being NaN.
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.zeros([BLOCK_R], tl.float32)
    for part in tl.static_range(PARTS):
        part_lse = _load_lse(lses[part], _offsets(index, walks, part * WALK + AXES, AXES), in_use)
        total += tl.exp(part_lse - maximum)
    all_empty = total == 0.0
    total = tl.where(all_empty, 1.0, total)

    OUT_WALK: tl.constexpr = PARTS * WALK
    OUT_TYPE: tl.constexpr = outs[PARTS].dtype.element_ty
    for first in tl.static_range(0, D, BLOCK_D):
        columns = first + tl.arange(0, BLOCK_D)[None, :]
        merged = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        for part in tl.static_range(PARTS):
            part_lse = _load_lse(lses[part], _offsets(index, walks, part * WALK + AXES, AXES), in_use)
            offsets = _tile_offsets(index, columns, walks, part * WALK, AXES, UNIT, CONTIGUOUS)
            # An empty part's out is not looked at: it may be NaN.
            used = (in_use & (part_lse != float("-inf")))[:, None] & (columns < D)
            values = widen(tl.load(outs[part] + offsets, mask=used, other=0.0), INTERPRETED)
            merged += (tl.exp(part_lse - maximum) / total)[:, None] * values
        offsets = _tile_offsets(index, columns, walks, OUT_WALK, AXES, UNIT, CONTIGUOUS)
        written = in_use[:, None] & (columns < D)
        tl.store(outs[PARTS] + offsets, narrow(merged, OUT_TYPE, INTERPRETED), mask=written)

    # Another warp may still read the lse of these rows from where this one is about to write: merging in place.
    tl.debug_barrier()
    merged_lse = tl.where(all_empty, float("-inf"), maximum + tl.log(total))
    tl.store(lses[PARTS] + _offsets(index, walks, OUT_WALK + AXES, AXES), merged_lse, mask=in_use)
