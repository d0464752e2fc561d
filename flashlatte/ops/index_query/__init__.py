"""Preparation of index queries: rotation, quantization, and folding of scales into the heads' weights."""

from flashlatte.ops.index_query.api import index_query, index_query_mxfp4

__all__ = ["index_query", "index_query_mxfp4"]
