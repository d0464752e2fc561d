"""A consumer's share of the softmax: which keys a row sees, and weights."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashlatte.kernels.hopper.lazy_softmax import HEADROOM
from flashlatte.ops.dense_prefill.hopper.forward.tiles import (
    ACC_COLS,
    ACC_ROWS,
    COPY,
    KEYS,
    ROWS,
    VALUES,
)
from flashlatte.runtime.gluon_compat import cta_barrier

# The reference of a row that has seen no key: below any score, and finite, so that it can be subtracted from itself.
_NO_SCORE = gl.constexpr(-1e30)


class Sight(NamedTuple):
    """Which keys the rows of a consumer see.

    Attributes:
        clean_from, clean_to: the keys that all rows see.
        position: of the first row.
        keys: of the request.
        left, right: the window.
    """

    clean_from: Any
    clean_to: Any
    position: Any
    keys: Any
    left: Any
    right: Any


class State(NamedTuple):
    """Statistics of the rows, [64]: the raw score whose weight is 1, and the sum of weights."""

    reference: Any
    total: Any


@gluon.jit
def sight(ticket, window, FIRST_ROW: gl.constexpr):
    position = ticket.position + FIRST_ROW
    clean_from = position + ROWS - 1 - window.left
    clean_to = gl.minimum(position + window.right + 1, ticket.keys)
    return Sight(clean_from, clean_to, position, ticket.keys, window.left, window.right)


@gluon.constexpr_function
def _hide_asm():
    # A thread holds 64 scores: of its first column and the one behind it, both of its first row and then of its
    # second; the next four are 8 columns further. Operands: 0 to 63 the scores, also 64 to 127; 128 to 191 and 192 to
    # 255, how far behind the thread's first column the row's first seen key is, and its first key not seen any more.
    hide = []
    for i in range(64):
        column = (i & 1) + (i >> 2) * 8
        row = i & 2
        hide += [
            f"setp.le.s32 seen, ${128 + row}, {column};",
            f"setp.gt.and.s32 seen, ${192 + row}, {column}, seen;",
            f"selp.f32 ${i}, ${i}, 0fFF800000, seen;",
        ]
    return " ".join(["{ .reg .pred seen;", *hide, "}"])


@gluon.constexpr_function
def _hide_constraints():
    return ",".join(["=f"] * 64 + [str(i) for i in range(64)] + ["r"] * 128)


@gluon.jit
def hide(scores, sight, first_key):
    """Scores [64, 128] of the block at ``first_key``, -inf where a row does not see the key.

    In assembly, where columns are constants: the compiler would keep them in registers, also outside of the branch.
    """
    if (first_key < sight.clean_from) | (first_key + KEYS > sight.clean_to):
        position = sight.position - first_key + gl.arange(0, ROWS, ACC_ROWS)
        seen_from = position - sight.left
        seen_to = gl.minimum(position + sight.right + 1, sight.keys - first_key)
        key = gl.arange(0, KEYS, ACC_COLS)[None, :]
        scores = gl.inline_asm_elementwise(
            _hide_asm(),
            _hide_constraints(),
            [scores, seen_from[:, None] - key, seen_to[:, None] - key],
            gl.float32,
            is_pure=True,
            pack=64,
        )
    return scores


@gluon.jit
def zero_values(tile, first):
    """Zero the values [128, 128] from row ``first`` on.

    They belong to another request or to none, and may be NaN, which a weight of zero would not hide. Both consumers do
    so, each before its own product: what they write is the same.
    """
    row = gl.arange(0, KEYS, gl.SliceLayout(1, COPY))
    for col in gl.static_range(0, VALUES, 64):
        part = tile.slice(col, 64, dim=1)
        values = part.load(COPY)
        part.store(gl.where((row < first)[:, None], values, 0.0).to(values.dtype))
    fence_async_shared()
    cta_barrier()


@gluon.jit
def empty_state():
    return State(gl.full([ROWS], _NO_SCORE, gl.float32, ACC_ROWS), gl.zeros([ROWS], gl.float32, ACC_ROWS))


@gluon.jit
def attend(state, scores, scale_log2):
    """Weights of a block, the statistics with it, and the factor by which what was summed before shrinks."""
    maximum = gl.max(scores, 1)
    reference = gl.where((maximum - state.reference) * scale_log2 > HEADROOM, maximum, state.reference)
    weights = gl.exp2(scores * scale_log2 - (reference * scale_log2)[:, None])
    decay = gl.exp2((state.reference - reference) * scale_log2)
    return weights, State(reference, state.total * decay + gl.sum(weights, 1)), decay
