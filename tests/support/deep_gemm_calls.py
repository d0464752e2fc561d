"""Queries and keys as DeepGEMM's callers pass them, with their dequantized values, and logits in float64."""

import torch

from flashlatte.kv_cache import fp4
from flashlatte.kv_cache.fp8 import dequantize_tiles, quantize_tiles


def generator(seed):
    return torch.Generator().manual_seed(seed)


def draw(*shape, seed):
    return torch.randn(shape, generator=generator(seed)).bfloat16().float()


def logits_of(q, k, weights):
    products = torch.einsum("mhd,nd->mhn", q.double(), k.double()).relu()
    return torch.einsum("mh,mhn->mn", weights.double(), products)


def mxfp8(x):
    """float8_e4m3fn values, int32 scales, and their dequantized values."""
    values, scales = quantize_tiles(x, 32, "power_of_two")
    packed = scales.to(torch.float8_e8m0fnu).view(torch.int32).squeeze(-1)
    return (values, packed), dequantize_tiles(values, scales, 32)


def drawn_query(q, mxfp4):
    """q as DeepGEMM's callers pass it, and its dequantized values."""
    if not mxfp4:
        values = q.to(torch.float8_e4m3fn)
        return (values, None), values.double()
    values, scales = fp4.quantize_mxfp4(q)
    return (values.view(torch.int8), scales.view(torch.int32).squeeze(-1)), fp4.dequantize_mxfp4(
        values, scales
    ).double()


def assert_near(logits, expected, bound, dtype):
    """Within the float32 error of sums whose absolute values sum to ``bound``, and one rounding to ``dtype``."""
    allowed = 1e-5 * bound + (torch.finfo(dtype).eps * expected.abs() if dtype == torch.bfloat16 else 0)
    assert logits.dtype == dtype
    assert ((logits.double() - expected).abs() <= allowed).all()
