"""Sparse prefill with products in e4m3, for ``precision="fp8"``, on ``kernels.hopper.e4m3``.

kv is quantized to a workspace first, whose selected rows the loader gathers. A tile is 64 heads of one query token. The
loader quantizes the queries of the next tile while the consumers process a tile.
"""
