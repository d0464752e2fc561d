"""Head weights of index queries: a float32 matmul of few rows."""

from flashlatte.ops.index_weights.api import MAX_ROWS, index_weights

__all__ = ["MAX_ROWS", "index_weights"]
