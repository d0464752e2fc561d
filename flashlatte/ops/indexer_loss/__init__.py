"""The loss that trains the indexer of DeepSeek Sparse Attention."""

from flashlatte.ops.indexer_loss.api import indexer_loss

__all__ = ["indexer_loss"]
