"""``index_query``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.fp8 import SCALE_ROUNDINGS
from flashlatte.kv_cache.index_formats import check_head_dim
from flashlatte.ops.index_query.reference import IndexQueryParams
from flashlatte.runtime import checks, dispatch, gradients, refusals
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "index_query"


@repeats_launches
def index_query(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos_sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    *,
    rope_first: bool = True,
    interleaved: bool = False,
    hadamard: bool = False,
    softmax_scale: float | None = None,
    head_scale: float | None = None,
    smallest_amax: float = 1e-10,
    scale_rounding: str = "exact",
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prepare index queries for ``index_logits``: rotate, transform, quantize heads to e4m3, fold scales into weights.

    A head's scale is max(amax, smallest_amax) / 448. It is not stored: the head's weight becomes weight · scale ·
    softmax_scale · head_scale. It has no backward pass, and warns once if gradients are enabled and an input requires
    one.

    Args:
        q: [T, H, head_dim] as projected, bf16, fp16 or float32; head_dim 32, 64 or 128.
        weights: [T, H], the weight of each head, bf16, fp16 or float32.
        cos_sin: float32 [n, rope_dim], the cosines, then the sines of each frequency; None if q is already rotated.
        positions: int32 or int64 [T], the table's row of each token. Positions outside the table are clamped.
        rope_first: whether the first rope_dim values are rotated (DeepSeek-V3.2), or the last ones (V4).
        interleaved: whether a frequency rotates values 2i and 2i + 1 (V4); else i and i + rope_dim / 2 (V3.2).
        hadamard: multiply by Sylvester's Hadamard matrix / √head_dim; the rotated values are rounded to q's dtype
            first. Keys must have the same transform.
        softmax_scale: head_dim^-0.5 if None.
        head_scale: H^-0.5 if None.
        smallest_amax: 1e-10 (V3.2) or 1e-4 (V4).
        scale_rounding: "exact", or "power_of_two" to round scales up.
        backend: "portable" or "reference"; None selects one.

    Returns:
        float8_e4m3fn [T, H, head_dim] and float32 weights [T, H].

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    checks.choice("scale_rounding", scale_rounding, SCALE_ROUNDINGS)
    checks.float32_factor("smallest_amax", smallest_amax)
    _check(q, weights, cos_sin, positions)
    params = IndexQueryParams(
        q=q,
        weights=weights,
        cos_sin=cos_sin,
        positions=positions,
        rope_first=checks.flag("rope_first", rope_first),
        interleaved=checks.flag("interleaved", interleaved),
        hadamard=checks.flag("hadamard", hadamard),
        weight_scale=_weight_scale(q, softmax_scale, head_scale),
        smallest_amax=smallest_amax,
        scale_rounding=scale_rounding,
        values=torch.empty(q.shape, dtype=torch.uint8, device=q.device),
        scales=None,
        folded=torch.empty(q.shape[:2], dtype=torch.float32, device=q.device),
    )
    _run(params, backend)
    return params.values.view(torch.float8_e4m3fn), params.folded


@repeats_launches
def index_query_mxfp4(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos_sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    *,
    rope_first: bool = False,
    interleaved: bool = True,
    hadamard: bool = False,
    softmax_scale: float | None = None,
    head_scale: float | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prepare index queries in fp4: rotate, transform, quantize each 32 values of a head to e2m1 with a scale.

    A scale is amax / 6 rounded up to a power of two, as in caches of format ``index_mxfp4``. The scales are returned; a
    head's weight becomes weight · softmax_scale · head_scale.

    Args:
        q, weights, cos_sin, positions, rope_first, interleaved, hadamard, softmax_scale, head_scale, backend: as for
            ``index_query``. The defaults of the rotation are DeepSeek-V4's.

    Returns:
        uint8 [T, H, head_dim / 2], value 2i in a byte's low half and 2i + 1 in its high half; E8M0 bytes, uint8
        [T, H, head_dim / 32]; and float32 weights [T, H].

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    _check(q, weights, cos_sin, positions)
    num_tokens, heads, head_dim = q.shape
    scales = torch.empty(num_tokens, heads, head_dim // 32, dtype=torch.uint8, device=q.device)
    params = IndexQueryParams(
        q=q,
        weights=weights,
        cos_sin=cos_sin,
        positions=positions,
        rope_first=checks.flag("rope_first", rope_first),
        interleaved=checks.flag("interleaved", interleaved),
        hadamard=checks.flag("hadamard", hadamard),
        weight_scale=_weight_scale(q, softmax_scale, head_scale),
        smallest_amax=1.0,
        scale_rounding="power_of_two",
        values=torch.empty(num_tokens, heads, head_dim // 2, dtype=torch.uint8, device=q.device),
        scales=scales,
        folded=torch.empty(num_tokens, heads, dtype=torch.float32, device=q.device),
    )
    _run(params, backend)
    return params.values, scales, params.folded


def _check(
    q: torch.Tensor, weights: torch.Tensor, cos_sin: torch.Tensor | None, positions: torch.Tensor | None
) -> None:
    checks.tensor("q", q, ("T", "H", "head_dim"), checks.FLOAT_DTYPES, may_be_empty=1)
    num_tokens, heads, head_dim = q.shape
    check_head_dim("q", head_dim)
    checks.tensor("weights", weights, (num_tokens, heads), checks.FLOAT_DTYPES, q.device)
    if (cos_sin is None) != (positions is None):
        raise ValueError("cos_sin and positions must be given together, got only one")
    if cos_sin is not None and positions is not None:
        checks.tensor("cos_sin", cos_sin, ("n", "rope_dim"), (torch.float32,), q.device)
        if cos_sin.shape[1] % 2 or cos_sin.shape[1] > head_dim:
            raise ValueError(f"cos_sin must have an even width of at most {head_dim}, got {cos_sin.shape[1]}")
        if not cos_sin.is_contiguous():
            raise ValueError(f"cos_sin must be contiguous, got strides {cos_sin.stride()}")
        checks.indices("positions", positions, (num_tokens,), q.device)


def _weight_scale(q: torch.Tensor, softmax_scale: float | None, head_scale: float | None) -> float:
    _, heads, head_dim = q.shape
    of_heads = heads**-0.5 if head_scale is None else checks.finite("head_scale", head_scale)
    factor = checks.softmax_scale(softmax_scale, head_dim) * of_heads
    if abs(factor) > torch.finfo(torch.float32).max:
        raise ValueError(f"head_scale times softmax_scale must be a finite float32 number, got {factor}")
    return factor


def _run(params: IndexQueryParams, backend: str | None) -> None:
    q = params.q
    gradients.warn_if_dropped(OPERATION, q, params.weights)
    backend = dispatch.select(
        dispatch.CallSpec(OPERATION, q.device, q.dtype, head_dim=q.shape[2], h_q=q.shape[1]), backend
    )
    if q.shape[0]:
        _index_query(params, backend)


@register_op(OPERATION, mutates=("values", "scales", "folded"))
@dispatch.implemented(OPERATION, portable=refusals.triton)
def _index_query(params: IndexQueryParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.index_query.portable import index_query
    else:
        from flashlatte.ops.index_query.reference import index_query

    index_query(params)
