"""Records of both kernels: the piece of queries that they process, and the layout of P and dS in memory."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.runtime.kernel_records import Int32, Int64, Pointer

# Heads and keys of a step.
HEADS = gl.constexpr(64)
KEYS = gl.constexpr(64)
# Columns of a TMA box: 128 bytes, the width of the swizzle.
BOX = gl.constexpr(64)
# The two matrices of a step in memory.
DS = gl.constexpr(0)
P = gl.constexpr(1)
PARTS = gl.constexpr(2)


class SparseBackwardPiece(NamedTuple):
    """Query tokens whose P and dS are in memory at once.

    Attributes:
        scores: TMA descriptor of boxes [64 heads, 64 keys] of [tokens, key_tiles, head_blocks, dS or P, 64, 64], as a
            matrix of 64 columns.
        first_token: first query token of the piece.
        key_tiles: tiles of 64 selected keys of a token.
        head_blocks: blocks of 64 heads.
    """

    scores: Pointer
    first_token: Int32
    key_tiles: Int32
    head_blocks: Int32


class SparseBackwardRows(NamedTuple):
    """TMA descriptors [s_q, h_q, d] of boxes [1, 64 heads, 64 columns], and ``row_sums`` [4, rows]."""

    q: Pointer
    dout: Pointer
    sums: Pointer
    rows: Int64
    h_q: Int32


@gluon.jit
def score_row(piece, token, key_tile, head_block, PART: gl.constexpr):
    """Row in ``piece.scores`` of a box of a token. ``token``: counted from the piece's first."""
    box = ((token * piece.key_tiles + key_tile) * piece.head_blocks + head_block) * PARTS + PART
    return box * HEADS
