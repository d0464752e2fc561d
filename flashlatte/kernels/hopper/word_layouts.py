"""Register layouts of one-byte elements that a producer loads, casts to 16 bits and stores in a tile."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.runtime.gluon_compat import reinterpret

# Threads that share the words of a token.
THREADS = gl.constexpr(4)


@gluon.constexpr_function
def words_layout(GROUPS, WIDTH):
    """Layout of words [64, GROUPS, WIDTH]: a thread holds pieces of 16 bytes of two tokens, or of 8 if WIDTH is 8.

    Eight threads that store together hold 128 adjacent bytes of bf16 of two tokens, in different banks: a piece is 16
    values, of one byte or of half of one.
    """
    piece = min(WIDTH // THREADS, 4)
    more = [[0, 0, 16]] if WIDTH == 32 else []
    more += [[0, bit, 0] for bit in (1, 2) if bit < GROUPS]
    return gl.DistributedLinearLayout(
        reg_bases=[*([0, 0, bit] for bit in (1, 2) if bit < piece), *more, [32, 0, 0]],
        lane_bases=[[0, 0, piece], [0, 0, 2 * piece], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[8, 0, 0], [16, 0, 0]],
        block_bases=[],
        shape=[64, GROUPS, WIDTH],
    )


@gluon.constexpr_function
def flat(LAYOUT):
    """The layout of the same words as [64, GROUPS · WIDTH]."""
    _, groups, width = LAYOUT.shape

    def flattened(bases):
        return [[token, group * width + word] for token, group, word in bases]

    return gl.DistributedLinearLayout(
        reg_bases=flattened(LAYOUT.reg_bases),
        lane_bases=flattened(LAYOUT.lane_bases),
        warp_bases=flattened(LAYOUT.warp_bases),
        block_bases=[],
        shape=[LAYOUT.shape[0], groups * width],
    )


@gluon.jit
def as_words(tile):
    """View a tile [64, n] of 16-bit elements as words [64, n / 2] of two elements."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(tile.layout.swizzle_byte_width, 32, 2)
    return reinterpret(tile, gl.int32, [tile.shape[0], tile.shape[1] // 2], LAYOUT)


@gluon.jit
def words_of(tile):
    """``as_words`` of a tile [1, 64, n]."""
    return as_words(tile.index(0))


@gluon.jit
def load_words(rows, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """Load words FIRST to FIRST + n - 1 of 64 rows as [64, n], in a flat LAYOUT. ``rows`` [64]: pointers to the first
    words."""
    word = FIRST + gl.arange(0, LAYOUT.shape[1], gl.SliceLayout(0, LAYOUT))
    return gl.load(gl.convert_layout(rows, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None] + word[None, :])
