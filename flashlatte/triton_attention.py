"""Attention of query rows over tiles of keys, in Triton: loads of rows, and the step of an online softmax.

A key tile [keys, LATENT] is the value tile too; beside it may stand a tile [keys, ROPE] of columns that only the
scores see. WARPGROUPS lays the step out for Hopper's warp groups, VALUES_FIRST keeps the values as [LATENT, rows]:
see ``weigh``.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from flashlatte import dispatch
from flashlatte.kv_cache.triton_fp8 import widen

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
    capability = dispatch.compute_capability(device)
    if capability[0] in (9, 10):
        return "hopper" if capability[0] == 9 else "blackwell"
    return "ampere" if capability == (8, 0) else "small"


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

    The interpreter multiplies only float32 rightly.
    """
    cols = tl.arange(0, WIDTH)
    mask = in_use[:, None]
    if COUNT != WIDTH:
        mask = mask & (cols < COUNT)[None, :]
    rows = tl.load(base + offsets[:, None] + (FIRST + cols)[None, :], mask=mask, other=0)
    return widen(rows, INTERPRETED) if INTERPRETED else rows


@triton.jit
def no_keys(BLOCK_H: tl.constexpr, LATENT: tl.constexpr, VALUES_FIRST: tl.constexpr):
    """The state before the first tile: largest score of each row, sum of its weights, its values."""
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    values = tl.zeros([LATENT, BLOCK_H] if VALUES_FIRST else [BLOCK_H, LATENT], tl.float32)
    return peak, total, values


@triton.jit
def weigh(
    peak,
    total,
    values,
    q_latent,
    q_rope,
    latent,
    rope,
    valid,
    scale,
    position,
    stop,
    ROPE: tl.constexpr,
    WARPGROUPS: tl.constexpr,
    VALUES_FIRST: tl.constexpr,
):
    """The state after a tile of keys, of which those not ``valid`` (whose rows are 0) do not count.

    ``scale`` includes log2(e). The tile is the one at ``position`` < ``stop`` of the loop it is in.

    WARPGROUPS is for 64 query rows and eight warps. Triton gives the product q · k, because another one depends on
    it, to as many warps along its rows as there are, so that the second warp group repeats the work of the first;
    out of a branch it sees no such dependence, and gives each group half of the keys.

    VALUES_FIRST is for such tiles that come straight from memory. Triton keeps a third buffer of them, as a product
    may still read one when the loop goes round; not so where two products share a transposed tile, or two branches
    a tile. Tiles that are computed should not be VALUES_FIRST: they would pass through registers.
    """
    BLOCK_H: tl.constexpr = q_latent.shape[0]
    BLOCK_N: tl.constexpr = latent.shape[0]
    if WARPGROUPS:
        scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        if ROPE > 0:
            # The branches are alike.
            if position + BLOCK_N <= stop:
                scores = tl.dot(q_rope, tl.trans(rope))
            else:
                scores = tl.dot(q_rope, tl.trans(rope), scores)
        weights = tl.zeros([BLOCK_H, BLOCK_N], latent.dtype)
        kept = tl.full([BLOCK_H], 1.0, tl.float32)
        # Always so, which Triton does not know.
        if position < stop:
            scores = tl.dot(q_latent, tl.trans(latent), scores)
            peak, total, kept, weights = _soften(peak, total, scores, valid, scale, latent.dtype)
    else:
        scores = tl.dot(q_latent, tl.trans(latent))
        if ROPE > 0:
            scores = tl.dot(q_rope, tl.trans(rope), scores)
        peak, total, kept, weights = _soften(peak, total, scores, valid, scale, latent.dtype)
    if VALUES_FIRST:
        values = tl.dot(tl.trans(latent), tl.trans(weights), values * kept[None, :])
    else:
        values = tl.dot(weights, latent, values * kept[:, None])
    return peak, total, values


@triton.jit
def _soften(peak, total, scores, valid, scale, dtype: tl.constexpr):
    """New peak and total, what is kept of the values so far, and the weights [rows, keys] of scores."""
    scores = tl.where(valid[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) * scale
    weights = tl.exp2(scores * scale - shift[:, None])
    kept = tl.exp2(peak * scale - shift)
    return new_peak, total * kept + tl.sum(weights, axis=1), kept, weights.to(dtype)


@triton.jit
def normalize(peak, total, values, scale, VALUES_FIRST: tl.constexpr):
    """(values [rows, LATENT], base-2 lse [rows]) of a state: 0 and -inf where a row has no key."""
    total = tl.where(total == 0, 1.0, total)
    inverse = 1.0 / total
    values = tl.trans(values * inverse[None, :]) if VALUES_FIRST else values * inverse[:, None]
    return values, peak * scale + tl.log2(total)
