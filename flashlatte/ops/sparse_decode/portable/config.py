"""Tile sizes for caches with scales, whose tokens are dequantised in registers."""

from __future__ import annotations

from flashlatte.kernels.triton.config import AttentionConfig, Table

PACKED_TOKENS: Table = {
    "hopper": (
        AttentionConfig(16, 64, num_warps=8),
        AttentionConfig(32, 64, num_warps=8),
        AttentionConfig(64, 64, num_warps=8, warpgroups=True, column_sums=False),
    ),
    "blackwell": (
        AttentionConfig(16, 64, num_warps=8),
        AttentionConfig(32, 64, num_warps=8),
    ),
    "ampere": (
        AttentionConfig(16, 64, num_warps=8),
        AttentionConfig(32, 32, num_warps=8),
        AttentionConfig(64, 32, num_warps=8),
    ),
    "small": (
        AttentionConfig(16, 32, num_warps=8),
        AttentionConfig(32, 32, num_warps=8),
    ),
    "other": (
        AttentionConfig(16, 16, num_warps=4),
        AttentionConfig(32, 16, num_warps=4),
    ),
    "interpreter": (
        AttentionConfig(16, 16, num_warps=1),
        AttentionConfig(32, 32, num_warps=1),
    ),
}

# For e4m3 formats: if shared memory has room (``num_stages`` above 1), tiles are prefetched to it in packed form.
STAGED_TOKENS: Table = PACKED_TOKENS | {
    "hopper": (*PACKED_TOKENS["hopper"][:-1], AttentionConfig(64, 64, num_warps=8, num_stages=5, warpgroups=True)),
}
