"""Sparse prefill with products in e4m3, for ``precision="fp8"``, on ``kernels.hopper.e4m3``.

kv is first quantized to a workspace, from which the loader gathers the selected rows. A tile is 64 heads of one query
token. While the consumers process a tile, the loader quantizes the queries of the next one.
"""
