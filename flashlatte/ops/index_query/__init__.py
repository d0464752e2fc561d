"""Preparation of index queries: rotation, quantisation, and folding of scales into the heads' weights."""

from flashlatte.ops.index_query.api import index_query, index_query_mxfp4

__all__ = ["index_query", "index_query_mxfp4"]
