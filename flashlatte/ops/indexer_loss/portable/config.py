"""Tiles of the kernels for each class of GPUs, by what fits registers and shared memory."""

from __future__ import annotations

from flashlatte.kernels.triton.config import AttentionConfig, Table

# lse and target: a program holds block_h rows of q; a step loads block_n keys.
ATTENTION: Table = {
    "hopper": (
        AttentionConfig(16, 64, 4, 3),
        AttentionConfig(32, 64, 8, 3),
        AttentionConfig(64, 64, 8, 3),
        AttentionConfig(128, 32, 8, 3),
    ),
    "blackwell": (AttentionConfig(16, 64, 4, 3), AttentionConfig(32, 64, 8, 3), AttentionConfig(64, 64, 8, 3)),
    "ampere": (AttentionConfig(16, 32, 4, 3), AttentionConfig(32, 32, 8, 3), AttentionConfig(64, 32, 8, 3)),
    "small": (AttentionConfig(16, 16, 4, 3), AttentionConfig(32, 16, 4, 3)),
    "other": (AttentionConfig(16, 16, 4),),
    "interpreter": (AttentionConfig(16, 16, 1), AttentionConfig(32, 16, 1)),
}
# Gradients of index keys: a program holds block_n index keys and, in float32, their gradient; a step loads block_h rows
# of index_q.
INDEX_KEYS: Table = {
    "hopper": (AttentionConfig(16, 128, 8, 3), AttentionConfig(64, 128, 8, 2)),
    "blackwell": (AttentionConfig(16, 128, 8, 3), AttentionConfig(64, 128, 8, 2)),
    "ampere": (AttentionConfig(16, 64, 4, 3), AttentionConfig(32, 64, 4, 2)),
    "small": (AttentionConfig(16, 32, 4, 2),),
    "other": (AttentionConfig(16, 32, 4),),
    "interpreter": (AttentionConfig(16, 32, 1),),
}
# Index logits, and gradients of index_q and index_weights: a program holds block_h rows of index_q and, in float32,
# their gradient; a step loads block_n index keys.
INDEX_QUERIES: Table = {
    "hopper": (AttentionConfig(16, 64, 4, 3), AttentionConfig(64, 64, 4, 3)),
    "blackwell": (AttentionConfig(16, 64, 4, 3), AttentionConfig(64, 64, 4, 3)),
    "ampere": (AttentionConfig(16, 64, 4, 3), AttentionConfig(64, 32, 4, 3)),
    "small": (AttentionConfig(16, 32, 4, 3),),
    "other": (AttentionConfig(16, 32, 4),),
    "interpreter": (AttentionConfig(16, 16, 1), AttentionConfig(32, 16, 1)),
}
