"""The arithmetic of attention with ``precision="fp8"``: quantized queries and probabilities.

Keys and values of an e4m3 cache are exact operands. 16-bit keys and values are rounded to e4m3 with one power-of-two
scale, which costs nothing in the softmax. Queries are rounded to e4m3 with a power-of-two scale for each token and
head. Their rope, the columns after those of a value, is rounded to the sum of two e4m3 terms. The second term costs a
tenth of a score's products; without it errors exceed FlashMLA's if few keys dominate (docs/notes/dense-decode-fp8.md).
P is rounded to e4m3, its sum is not.
"""

from __future__ import annotations

import torch

from flashlatte.kv_cache.fp8 import E4M3_MAX, round_up_to_power_of_two, to_e4m3

# The largest P of a row is 2^P_EXPONENT. Before kernels rescale the output, the exponent may be up to P_MARGIN larger;
# the largest e4m3 value is 448.
P_EXPONENT = 5.0
P_MARGIN = 3.0
# Lower bound of the amax of a row of queries, so that its scale is not 0.
SMALLEST_AMAX = 1e-30


def quantize_queries(q: torch.Tensor, head_dim_v: int) -> torch.Tensor:
    """The values of quantized queries [..., d], as float32."""
    q = q.float()
    amax = q.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1, keepdim=True).clamp_min(SMALLEST_AMAX)
    scale = round_up_to_power_of_two(amax / E4M3_MAX)
    scaled = q / scale
    rounded = to_e4m3(scaled).float()
    rope = scaled[..., head_dim_v:] - rounded[..., head_dim_v:]
    rounded[..., head_dim_v:] += to_e4m3(rope).float()
    return rounded * scale


def quantize_keys(kv: torch.Tensor) -> torch.Tensor:
    """The values of quantized keys of any shape, as float32, with one scale: the smallest power of two for which all
    finite values are at most 448. Infinities become the largest value, NaN stays NaN."""
    kv = kv.float()
    amax = torch.where(kv.isfinite(), kv.abs(), 0.0).amax().clamp_min(SMALLEST_AMAX)
    scale = round_up_to_power_of_two(amax / E4M3_MAX)
    return to_e4m3(kv / scale).float() * scale


def round_probabilities(p: torch.Tensor) -> torch.Tensor:
    """Probabilities [..., keys] rounded to e4m3, scaled so that the largest of a row is 2^P_EXPONENT."""
    if not p.shape[-1]:
        return p
    unit = p.amax(-1, keepdim=True) * 2.0**-P_EXPONENT
    return torch.where(unit == 0, 0.0, to_e4m3(p / unit).float() * unit)
