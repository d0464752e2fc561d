"""The attention loop of the portable latent kernels: a loader gives tiles of keys, the online softmax adds them.

``step`` is a ``config.StepConfig``.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import to_float32
from flashlatte.runtime import machine
from flashlatte.runtime.triton_kernel import INTERPRETED

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Classes of NVIDIA GPUs, where kernels may use inline PTX. "small" has 99 KiB of shared memory.
NVIDIA = frozenset({"hopper", "blackwell", "ampere", "small"})


@machine.cached
def gpu_class(device: torch.device) -> str:
    """The GPU class, the key of the tables of configurations."""
    device_type = machine.device_type(device)
    if device_type == "cpu":
        return "interpreter"
    if device_type != "cuda" or torch.version.hip is not None:
        return "other"
    capability = machine.compute_capability(device)
    if capability[0] in (9, 10):
        return "hopper" if capability[0] == 9 else "blackwell"
    return "ampere" if capability == (8, 0) else "small"


class RowTile(NamedTuple):
    """Rows of queries or keys as operands of a matrix product.

    Attributes:
        latent: [rows, latent]; for keys, it is also the values.
        rope: [rows, rope]; any tensor if there is no such part.
    """

    latent: Any
    rope: Any


class OnlineSoftmaxState(NamedTuple):
    """State of the online softmax: ``empty_state``, then ``online_softmax_step`` for each tile, then ``normalize``.

    Attributes:
        row_max: [rows], the largest score.
        row_sum: [rows, keys of a tile], the sums of P per column; [rows] if not ``column_sums``.
        out: [rows, latent], P · V; [latent, rows] if ``values_first``.
    """

    row_max: Any
    row_sum: Any
    out: Any


@triton.jit
def within(index, limit):
    """0 <= index < limit, in one comparison."""
    unsigned: tl.constexpr = tl.uint64 if index.dtype == tl.int64 else tl.uint32
    return index.to(unsigned, bitcast=True) < limit.to(unsigned)


@triton.jit
def load_rows(base, offsets, in_use, FIRST: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Load elements FIRST to FIRST + COUNT of the rows at ``offsets`` as an operand [rows, WIDTH]; 0 where not in use.

    Floating-point rows are float32 in the interpreter, whose other products are wrong. Integer rows keep their dtype.
    """
    cols = tl.arange(0, WIDTH)
    mask = in_use[:, None]
    if COUNT != WIDTH:
        mask = mask & (cols < COUNT)[None, :]
    rows = tl.load(base + offsets[:, None] + (FIRST + cols)[None, :], mask=mask, other=0)
    return to_float32(rows) if INTERPRETED and base.dtype.element_ty.is_floating() else rows


@triton.jit
def load_tile(base, offsets, in_use, step: tl.constexpr):
    """Load the rows at ``offsets``, 0 where not in use."""
    latent = load_rows(base, offsets, in_use, 0, step.latent_dim, step.latent)
    rope = latent
    if step.rope > 0:
        rope_dim: tl.constexpr = step.head_dim - step.latent_dim
        rope = load_rows(base, offsets, in_use, step.latent_dim, rope_dim, step.rope)
    return RowTile(latent, rope)


@triton.jit
def load_query(base, offsets, rope, request, token, head, in_use, step: tl.constexpr):
    """The queries at ``offsets``, with the rotated part of ``rope``, a ``rows.QueryRopeRows``, if that has it."""
    if rope.start is None:
        return load_tile(base, offsets, in_use, step)
    else:
        latent = load_rows(base, offsets, in_use, 0, step.latent_dim, step.latent)
        offsets = request * rope.stride_request + token * rope.stride_token + head.to(tl.int64) * rope.stride_head
        rope_dim: tl.constexpr = step.head_dim - step.latent_dim
        return RowTile(latent, load_rows(rope.start, offsets * rope.align, in_use, 0, rope_dim, step.rope))


@triton.jit
def load_keys(kv, index, valid, step: tl.constexpr):
    """The rows of kv, a ``rows.TokenRows``, at ``index`` [block_n]; 0 where not ``valid``."""
    return load_tile(kv.start, tl.where(valid, index, 0) * kv.stride * kv.align, valid, step)


@triton.jit
def empty_state(step: tl.constexpr):
    """The state before the first tile."""
    ROWS: tl.constexpr = step.block_h
    COLS: tl.constexpr = step.block_n
    LATENT: tl.constexpr = step.latent
    return OnlineSoftmaxState(
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS, COLS] if step.column_sums else [ROWS], tl.float32),
        tl.zeros([LATENT, ROWS] if step.values_first else [ROWS, LATENT], tl.float32),
    )


@triton.jit
def no_prefetch(source, begin, stop, config: tl.constexpr, step: tl.constexpr):
    """PREFETCH of a loader that loads nothing ahead. Triton 3.6 cannot return None."""
    return begin


@triton.jit
def attend(
    state,
    q,
    source,
    begin,
    stop,
    scale,
    PREFETCH: tl.constexpr,
    LOAD: tl.constexpr,
    config: tl.constexpr,
    step: tl.constexpr,
):
    """The state after keys ``begin`` to ``stop`` (exclusive) of ``source``. ``scale`` includes log2(e).

    A loader is two functions. ``config``: its constants.

    PREFETCH(source, begin, stop, config, step) loads what the first tile needs ahead of the loop, such as pages or
    indices, on which the addresses of its rows depend.

    LOAD(source, ahead, start, stop, dtype, config, step) returns the tile of the ``block_n`` keys from ``start`` on, a
    ``RowTile`` of ``dtype``; the mask of visible keys, [rows or 1, block_n]; and what the next tile needs ahead.
    """
    ahead = PREFETCH(source, begin, stop, config, step)
    for start in tl.range(begin, stop, step.block_n, num_stages=step.num_stages):
        keys, visible, ahead = LOAD(source, ahead, start, stop, q.latent.dtype, config, step)
        state = online_softmax_step(state, q, keys, visible, scale, start, stop, step)
    return state


@triton.jit
def online_softmax_step(state, q, keys, visible, scale, position, stop, step: tl.constexpr):
    """The state after a tile of keys. ``visible`` [rows or 1, keys] is the mask; masked keys must be finite.

    ``scale`` includes log2(e). ``position`` < ``stop``: position of the tile in the enclosing loop.

    ``warpgroups`` is for 64 query rows and eight warps. Since another product depends on q · k, Triton distributes all
    warps along its rows, and the second warp group repeats the work of the first. If q · k is in a branch, Triton does
    not detect the dependence, and assigns half of the keys to each group.

    ``values_first`` is for such tiles if they are multiplied as loaded. Triton allocates a third buffer for a tile that
    a product may still read in the next iteration, but not if two products share a transposed tile or two branches
    share a tile. Computed tiles would go through registers.
    """
    ROWS: tl.constexpr = step.block_h
    COLS: tl.constexpr = step.block_n
    dtype: tl.constexpr = keys.latent.dtype
    row_max = state.row_max
    row_sum = state.row_sum
    if step.warpgroups:
        scores = tl.zeros([ROWS, COLS], tl.float32)
        if step.rope > 0:
            # Both branches compute the same scores; the branch itself is what matters.
            if position + COLS <= stop:
                scores = tl.dot(q.rope, tl.trans(keys.rope))
            else:
                scores = tl.dot(q.rope, tl.trans(keys.rope), scores)
        # The values of the path that is never taken must not be constants, which would be allocated in shared memory.
        p = tl.broadcast_to(row_max.to(dtype)[:, None], [ROWS, COLS])
        alpha = tl.full([ROWS], 1.0, tl.float32)
        # Always true, which Triton cannot prove.
        if position < stop:
            scores = tl.dot(q.latent, tl.trans(keys.latent), scores)
            scores = tl.where(visible, scores, float("-inf"))
            row_max, row_sum, alpha, p = softmax(row_max, row_sum, scores, scale, step.column_sums)
            p = p.to(dtype)
    else:
        scores = tl.dot(q.latent, tl.trans(keys.latent))
        if step.rope > 0:
            scores = tl.dot(q.rope, tl.trans(keys.rope), scores)
        scores = tl.where(visible, scores, float("-inf"))
        row_max, row_sum, alpha, p = softmax(row_max, row_sum, scores, scale, step.column_sums)
        p = p.to(dtype)
    if step.values_first:
        out = tl.dot(tl.trans(keys.latent), tl.trans(p), state.out * alpha[None, :])
    else:
        out = tl.dot(p, keys.latent, state.out * alpha[:, None])
    return OnlineSoftmaxState(row_max, row_sum, out)


@triton.jit
def softmax(row_max, row_sum, scores, scale, COLUMN_SUMS: tl.constexpr = False, P_SHIFT: tl.constexpr = 0):
    """New row_max and row_sum, the rescale factor alpha [rows], and P · 2^P_SHIFT [rows, keys] of masked ``scores``.

    ``row_sum`` is [rows, keys] if COLUMN_SUMS, else [rows], and includes the factor of P.
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) * scale
    p = tl.exp2(scores * scale - (shift - P_SHIFT if P_SHIFT != 0 else shift)[:, None])
    alpha = tl.exp2(row_max * scale - shift)
    row_sum = row_sum * alpha[:, None] + p if COLUMN_SUMS else row_sum * alpha + tl.sum(p, axis=1)
    return new_max, row_sum, alpha, p


@triton.jit
def normalize(state, scale, step: tl.constexpr):
    """Returns (values [rows, latent], base-2 lse [rows]); 0 and -inf for rows without a visible key."""
    row_sum = tl.sum(state.row_sum, axis=1) if step.column_sums else state.row_sum
    inverse, lse2 = finish(state.row_max, row_sum, scale)
    values = tl.trans(state.out * inverse[None, :]) if step.values_first else state.out * inverse[:, None]
    return values, lse2


@triton.jit
def finish(row_max, row_sum, scale):
    """(1 / row_sum, base-2 lse) of rows [rows]; 1 and -inf for rows without a visible key."""
    row_sum = tl.where(row_sum == 0, 1.0, row_sum)
    # An explicit fma: otherwise the rest of the kernel would determine whether the product is rounded before the sum.
    return 1.0 / row_sum, tl.fma(row_max, scale, tl.log2(row_sum))


@triton.jit
def sink_weight(sink, stride, heads, in_use, lse2, is_empty):
    """e^lse / (e^lse + e^sink) for rows with base-2 lse ``lse2`` and the sinks of their ``heads``; 0 for empty rows."""
    sink2 = tl.load(sink + heads * stride, mask=in_use, other=0.0) * LOG2_E
    return tl.where(is_empty, 0.0, 1.0 / (1.0 + tl.exp2(sink2 - lse2)))
