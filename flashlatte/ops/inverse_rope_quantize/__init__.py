"""Inverse rotation and quantization of attention outputs for the following matmul."""

from flashlatte.ops.inverse_rope_quantize.api import inverse_rope_quantize

__all__ = ["inverse_rope_quantize"]
