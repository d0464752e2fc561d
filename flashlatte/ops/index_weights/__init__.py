"""Head weights of index queries: a product in float32 of few rows."""

from flashlatte.ops.index_weights.api import MOST_ROWS, index_weights

__all__ = ["MOST_ROWS", "index_weights"]
