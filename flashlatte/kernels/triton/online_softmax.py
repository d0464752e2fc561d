"""Attention of query rows over tiles of keys, in Triton: loads of rows, and the step of an online softmax.

``step`` is a ``portable_config.Step``.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import widen
from flashlatte.runtime import machine

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Classes of NVIDIA GPUs, whose kernels may hold PTX. "small" has 99 KiB of shared memory.
NVIDIA = frozenset({"hopper", "blackwell", "ampere", "small"})


@functools.cache
def gpu_class(device: torch.device) -> str:
    """The class of GPUs that tables of configurations are by."""
    if device.type == "cpu":
        return "interpreter"
    if device.type != "cuda" or torch.version.hip is not None:
        return "other"
    capability = machine.compute_capability(device)
    if capability[0] in (9, 10):
        return "hopper" if capability[0] == 9 else "blackwell"
    return "ampere" if capability == (8, 0) else "small"


class Tile(NamedTuple):
    """Rows of queries or keys as operands of a matrix product.

    Attributes:
        latent: [rows, latent]; of keys it is the values too.
        rope: [rows, rope]; anything if there is no such part.
    """

    latent: Any
    rope: Any


class State(NamedTuple):
    """An online softmax over the keys so far: ``no_keys``, then ``weigh`` for each tile, then ``normalize``.

    Attributes:
        peak: [rows], the largest score.
        total: [rows, keys of a tile], the sums of weights by columns; [rows] if not ``column_sums``.
        weighted: [rows, latent], the sum of values by weight; [latent, rows] if ``values_first``.
    """

    peak: Any
    total: Any
    weighted: Any


@triton.jit
def within(index, limit):
    """0 <= index < limit, in one comparison."""
    unsigned: tl.constexpr = tl.uint64 if index.dtype == tl.int64 else tl.uint32
    return index.to(unsigned, bitcast=True) < limit.to(unsigned)


@triton.jit
def load_rows(
    base,
    offsets,
    in_use,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Numbers FIRST to FIRST + COUNT of the rows at ``offsets``, as a [rows, WIDTH] operand; 0 where not in use.

    The interpreter multiplies only float32 rightly. Bytes stay bytes.
    """
    cols = tl.arange(0, WIDTH)
    mask = in_use[:, None]
    if COUNT != WIDTH:
        mask = mask & (cols < COUNT)[None, :]
    rows = tl.load(base + offsets[:, None] + (FIRST + cols)[None, :], mask=mask, other=0)
    return widen(rows, True) if INTERPRETED and base.dtype.element_ty.is_floating() else rows


@triton.jit
def load_tile(base, offsets, in_use, step: tl.constexpr):
    """The rows at ``offsets``, 0 where not in use."""
    latent = load_rows(base, offsets, in_use, 0, step.latent_dim, step.latent, step.interpreted)
    rope = latent
    if step.rope > 0:
        rope_dim: tl.constexpr = step.head_dim - step.latent_dim
        rope = load_rows(base, offsets, in_use, step.latent_dim, rope_dim, step.rope, step.interpreted)
    return Tile(latent, rope)


@triton.jit
def no_keys(step: tl.constexpr):
    """The state before the first tile."""
    ROWS: tl.constexpr = step.block_h
    COLS: tl.constexpr = step.block_n
    LATENT: tl.constexpr = step.latent
    return State(
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS, COLS] if step.column_sums else [ROWS], tl.float32),
        tl.zeros([LATENT, ROWS] if step.values_first else [ROWS, LATENT], tl.float32),
    )


@triton.jit
def weigh(state, q, keys, visible, scale, position, stop, step: tl.constexpr):
    """The state after a tile of keys, of which a row sees those ``visible`` ([rows or 1, keys]). Others must be finite.

    ``scale`` includes log2(e). The tile is the one at ``position`` < ``stop`` of the loop it is in.

    ``warpgroups`` is for 64 query rows and eight warps. Triton gives the product q · k, because another one depends on
    it, to as many warps along its rows as there are, so that the second warp group repeats the work of the first;
    out of a branch it sees no such dependence, and gives each group half of the keys.

    ``values_first`` is for such tiles that come straight from memory. Triton keeps a third buffer of them, as a product
    may still read one when the loop goes round; not so where two products share a transposed tile, or two branches
    a tile. Tiles that are computed would pass through registers.
    """
    ROWS: tl.constexpr = step.block_h
    COLS: tl.constexpr = step.block_n
    dtype: tl.constexpr = keys.latent.dtype
    peak = state.peak
    total = state.total
    if step.warpgroups:
        scores = tl.zeros([ROWS, COLS], tl.float32)
        if step.rope > 0:
            # The branches are alike.
            if position + COLS <= stop:
                scores = tl.dot(q.rope, tl.trans(keys.rope))
            else:
                scores = tl.dot(q.rope, tl.trans(keys.rope), scores)
        weights = tl.zeros([ROWS, COLS], dtype)
        kept = tl.full([ROWS], 1.0, tl.float32)
        # Always so, which Triton does not know.
        if position < stop:
            scores = tl.dot(q.latent, tl.trans(keys.latent), scores)
            peak, total, kept, weights = _soften(peak, total, scores, visible, scale, dtype, step.column_sums)
    else:
        scores = tl.dot(q.latent, tl.trans(keys.latent))
        if step.rope > 0:
            scores = tl.dot(q.rope, tl.trans(keys.rope), scores)
        peak, total, kept, weights = _soften(peak, total, scores, visible, scale, dtype, step.column_sums)
    if step.values_first:
        weighted = tl.dot(tl.trans(keys.latent), tl.trans(weights), state.weighted * kept[None, :])
    else:
        weighted = tl.dot(weights, keys.latent, state.weighted * kept[:, None])
    return State(peak, total, weighted)


@triton.jit
def _soften(peak, total, scores, visible, scale, dtype: tl.constexpr, COLUMN_SUMS: tl.constexpr):
    """New peak and total, what is kept of the values so far, and the weights [rows, keys] of scores."""
    scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) * scale
    weights = tl.exp2(scores * scale - shift[:, None])
    kept = tl.exp2(peak * scale - shift)
    total = total * kept[:, None] + weights if COLUMN_SUMS else total * kept + tl.sum(weights, axis=1)
    return new_peak, total, kept, weights.to(dtype)


@triton.jit
def normalize(state, scale, step: tl.constexpr):
    """(values [rows, latent], base-2 lse [rows]) of a state: 0 and -inf where a row has no key."""
    total = tl.sum(state.total, axis=1) if step.column_sums else state.total
    total = tl.where(total == 0, 1.0, total)
    inverse = 1.0 / total
    values = tl.trans(state.weighted * inverse[None, :]) if step.values_first else state.weighted * inverse[:, None]
    # Said outright, or it depends on the rest of the kernel whether the product is rounded before the sum.
    return values, tl.fma(state.peak, scale, tl.log2(total))
