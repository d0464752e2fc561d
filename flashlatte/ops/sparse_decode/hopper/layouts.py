"""What a thread of the producer has of the rows that it copies, or dequantizes for a cluster; see ``word_layouts``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def copy_layout(WIDTH, IS_PLAIN):
    """Words [64, WIDTH] of 16-byte copies.

    For caches with scales a thread has the tokens of ``words_layout``. For others, which are copied whole, eight
    threads have a token's 128 bytes, of different banks.
    """
    more = [[0, 32], [0, 64]] if WIDTH == 128 else []
    if IS_PLAIN:
        reg_bases = [[0, 1], [0, 2], [16, 0], *more]
        lane_bases = [[0, 4], [0, 8], [1, 0], [0, 16], [2, 0]]
        warp_bases = [[4, 0], [8, 0], [32, 0]]
    else:
        reg_bases = [[0, 1], [0, 2], [0, 16], *more, [32, 0]]
        lane_bases = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
        warp_bases = [[8, 0], [16, 0]]
    return gl.DistributedLinearLayout(reg_bases, lane_bases, warp_bases, block_bases=[], shape=[64, WIDTH])


@gluon.constexpr_function
def tokens_layout(IS_PLAIN):
    return gl.SliceLayout(1, copy_layout(32, IS_PLAIN))


@gluon.constexpr_function
def _own_layout(WIDTH, REGISTERS, LANES):
    """Words [32, WIDTH] of the tokens that a CTA of a cluster dequantizes; 8 tokens are a warp's."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, word] for word in REGISTERS],
        lane_bases=[*([0, word] for word in LANES), [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, WIDTH],
    )


# 64 columns, as words of e4m3, 16 bytes of them a thread, and as words of bf16; and the four scales of v32.
PIECE = gl.constexpr(_own_layout(16, [1, 2], [4, 8]))
BF16_PIECE = gl.constexpr(_own_layout(32, [1, 2, 4], [8, 16]))
OWN_SCALES = gl.constexpr(_own_layout(4, [1, 2], [0, 0]))
