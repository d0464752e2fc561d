"""Multi-head attention of packed requests of variable length, forward and backward."""

from flashlatte.ops.dense_prefill.api import dense_prefill
from flashlatte.ops.dense_prefill.vision import vit_attention

__all__ = ["dense_prefill", "vit_attention"]
