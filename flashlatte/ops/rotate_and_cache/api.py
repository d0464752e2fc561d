"""``rotate_and_cache``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.kernels import rope
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.row_caches import as_row_cache, refuses_rows
from flashlatte.ops.rotate_and_cache.reference import RotateAndCacheParams
from flashlatte.runtime import checks, dispatch, gradients, refusals, value_checks
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "rotate_and_cache"


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    return refusals.triton(call) or refuses_rows(call)


@repeats_launches
def rotate_and_cache(
    q: torch.Tensor,
    kv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    q_eps: float | None = 1e-6,
    out: torch.Tensor | None = None,
    cache_format: str | CacheFormat | None = None,
    scale_rounding: str = "power_of_two",
    backend: str | None = None,
) -> torch.Tensor:
    """Normalize and rotate the heads of queries; rotate keys, quantize them and write them to a paged cache.

    DeepSeek-V4's step between its projections and attention. A head of q becomes q / √(mean q² + q_eps), without a
    weight. Then the last rope_dim elements of each head and of each key are rotated in pairs (2i, 2i + 1) by the
    token's position. Computed in float32 and rounded once. It has no backward pass, and warns once if gradients are
    enabled and an input requires one.

    Args:
        q: [T, H, head_dim] as projected, bf16, fp16 or float32. T may be 0.
        kv: [T, head_dim], already normalized, in q's dtype.
        cos_sin: float32 [n, rope_dim], the cosines, then the sines of each frequency.
        positions: int32 or int64 [T], the table's row of each token. Positions outside the table are clamped.
        cache: [pages, page_size, 1, width] (or without the 1) for rows of head_dim elements: ``model1``, ``v41``,
            ``v41_fp4``, ``bf16``, ``fp16`` or ``fp32``.
        slot_mapping: int32 or int64 [T], page · page_size + offset of each token; tokens whose slot is outside the
            cache are skipped.
        q_eps: epsilon of the norm; None omits the norm.
        out: [T, H, head_dim] in q's dtype to write to; it may be ``q`` itself.
        cache_format: None infers it from the cache.
        scale_rounding: for formats that support several.
        backend: "portable" or "reference"; None selects one.

    Returns:
        The queries [T, H, head_dim], or ``out``.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    checks.tensor("q", q, ("T", "H", "head_dim"), checks.FLOAT_DTYPES, may_be_empty=1)
    tokens, heads, head_dim = q.shape
    device = q.device
    checks.tensor("kv", kv, (tokens, head_dim), (q.dtype,), device)
    rope.check_rotation(cos_sin, positions, tokens, head_dim, device)
    checks.indices("slot_mapping", slot_mapping, (tokens,), device)
    cache, layout = as_row_cache(cache, cache_format, head_dim, scale_rounding, device)
    if q_eps is not None:
        q_eps = checks.epsilon("q_eps", q_eps)
    out = checks.output_or_new("out", out, q.shape, q.dtype, device)
    gradients.warn_if_dropped(OPERATION, q, kv)
    call = dispatch.CallSpec(OPERATION, device, q.dtype, layout.name, cache.shape[1], head_dim, h_q=heads)
    value_checks.entries("slot_mapping", slot_mapping, cache.shape[0] * cache.shape[1])
    backend = dispatch.select(call, backend)
    if tokens:
        params = RotateAndCacheParams(
            q=None if out is q else q,
            kv=kv,
            cos_sin=cos_sin,
            positions=positions,
            slot_mapping=slot_mapping,
            q_eps=q_eps,
            cache_format=layout.name,
            scale_rounding=scale_rounding,
            out=out,
            cache=cache,
        )
        _rotate_and_cache(params, backend)
    return out


@register_op(OPERATION, mutates=("out", "cache"))
@dispatch.implemented(OPERATION, portable=_refuses_portable)
def _rotate_and_cache(params: RotateAndCacheParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.rotate_and_cache.portable import rotate_and_cache
    else:
        from flashlatte.ops.rotate_and_cache.reference import rotate_and_cache

    rotate_and_cache(params)
