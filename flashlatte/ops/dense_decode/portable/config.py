"""Tile sizes for each class of GPUs, chosen by measurement."""

from __future__ import annotations

from flashlatte.kernels.triton.config import AttentionConfig, Table

TABLE: Table = {
    "hopper": (
        AttentionConfig(16, 64, num_warps=8, num_stages=3),
        AttentionConfig(32, 64, num_warps=8, num_stages=3),
        AttentionConfig(64, 64, num_warps=8, num_stages=3, warpgroups=True, boxes=True),
    ),
    # MMAs of 64 rows would use tensor memory, which has no room for [64, 512] in addition to the scores.
    "blackwell": (
        AttentionConfig(16, 64, num_warps=8, num_stages=3),
        AttentionConfig(32, 64, num_warps=8, num_stages=3),
    ),
    "ampere": (
        AttentionConfig(16, 32, num_warps=8, num_stages=4),
        AttentionConfig(32, 32, num_warps=8, num_stages=3),
        AttentionConfig(64, 32, num_warps=8, num_stages=3),
    ),
    "small": (
        AttentionConfig(16, 32, num_warps=8, num_stages=3),
        AttentionConfig(32, 16, num_warps=8, num_stages=3),
    ),
    "other": (
        AttentionConfig(16, 32, num_warps=4),
        AttentionConfig(32, 32, num_warps=4),
    ),
    "interpreter": (
        AttentionConfig(16, 16, num_warps=1),
        AttentionConfig(32, 32, num_warps=1),
    ),
}

# float8_e4m3fn keys are converted in registers, which leaves fewer registers for query rows.
FP8_TABLE: Table = {
    "hopper": (
        AttentionConfig(16, 64, num_warps=8, num_stages=3),
        AttentionConfig(64, 64, num_warps=8, num_stages=3, warpgroups=True),
    ),
    "blackwell": TABLE["blackwell"],
    "ampere": (AttentionConfig(16, 32, num_warps=8, num_stages=4),),
    "small": (AttentionConfig(16, 32, num_warps=8, num_stages=3),),
    "other": (AttentionConfig(16, 16, num_warps=4),),
    "interpreter": TABLE["interpreter"],
}
