"""Tiles of the backward kernels for each class of GPUs, by what fits registers and shared memory."""

from __future__ import annotations

from flashlatte.kernels.triton.config import AttentionConfig, Table

# A program holds block_n keys and their gradient in float32; a step loads block_h rows of q and dout. On "blackwell",
# 64 keys do not fit in tensor memory.
KEYS: Table = {
    "hopper": (AttentionConfig(16, 64, 8, 2, warpgroups=True), AttentionConfig(32, 64, 8, 2, warpgroups=True)),
    "blackwell": (AttentionConfig(16, 32, 8), AttentionConfig(32, 32, 8)),
    "ampere": (AttentionConfig(16, 32, 8), AttentionConfig(32, 32, 8)),
    "small": (AttentionConfig(16, 16, 4, 2),),
    "other": (AttentionConfig(16, 16, 4),),
    "interpreter": (AttentionConfig(16, 32, 1),),
}
# A program holds block_h rows of q and dout, and dq in float32; a step loads block_n keys.
QUERIES: Table = {
    "hopper": (
        AttentionConfig(16, 64, 8, 3),
        AttentionConfig(32, 64, 8, 3),
        AttentionConfig(64, 32, 8, 2, warpgroups=True),
    ),
    "blackwell": (AttentionConfig(16, 32, 4, 3), AttentionConfig(32, 32, 8, 3)),
    "ampere": (AttentionConfig(16, 32, 4, 3), AttentionConfig(32, 32, 8, 3)),
    "small": (AttentionConfig(16, 16, 4, 3),),
    "other": (AttentionConfig(16, 16, 4),),
    "interpreter": (AttentionConfig(16, 16, 1), AttentionConfig(32, 16, 1)),
}
