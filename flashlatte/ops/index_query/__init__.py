"""Index queries: rotated, quantised, their scales folded into the heads' weights."""

from flashlatte.ops.index_query.api import index_query, index_query_mxfp4

__all__ = ["index_query", "index_query_mxfp4"]
