"""Attention's output turned back and quantised for the product that follows."""

from flashlatte.ops.inverse_rope_quantize.api import inverse_rope_quantize

__all__ = ["inverse_rope_quantize"]
