"""``reshape_and_cache``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.kv_cache import scales
from flashlatte.kv_cache.one_byte import LARGEST
from flashlatte.kv_cache.slots import check_slots
from flashlatte.ops.reshape_and_cache.reference import ReshapeAndCacheParams
from flashlatte.runtime import checks, dispatch, gradients, refusals
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "reshape_and_cache"
# Maximum width of a head, which a program holds in registers.
PORTABLE_MAX_WIDTH = 1024


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    return refusals.triton(call) or refusals.head_dim_above(call, PORTABLE_MAX_WIDTH)


@repeats_launches
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Write new keys and values to the paged caches of ``paged_attention``, in place, quantized to their dtype.

    Caches and scales have the layout of ``paged_attention``. vLLM's layouts can be passed as views: [pages, page_size,
    h_kv, d] unchanged, with tokens and heads in either order in memory; [pages, h_kv, d / x, page_size, x] and [pages,
    h_kv, d_v, page_size] as ``k_cache.permute(0, 3, 1, 2, 4)`` and ``v_cache.permute(0, 3, 1, 2)``.

    Args:
        key: [T, h_kv, d], bf16, fp16 or float32, last stride 1; T ≥ n, tokens from n on are padding and are not read. T
            may be 0.
        value: [T, h_kv, d_v] in key's dtype. d_v may differ from d.
        k_cache: [pages, page_size, h_kv, d], any strides, or [pages, page_size, h_kv, d / x, x] with last stride 1; in
            key's dtype, float8_e4m3fn, float8_e5m2 or int8.
        v_cache: [pages, page_size, h_kv, d_v], any strides, in k_cache's dtype.
        slot_mapping: int32 or int64 [n], page · page_size + offset of each token. A token whose slot is outside the
            cache is skipped. Slots must differ from each other.
        k_scale: scale of a quantized k_cache, which stores key / k_scale, rounded to nearest even and saturated. A
            number, or float32 with one element or [h_kv], on key's device; default 1. Or float32 [pages, page_size,
            h_kv], any strides, to write to: the scale of each token and head, amax / the largest value of the dtype
            (448, 57344 or 127), at least 1e-6.
        v_scale: the same for v_cache.
        backend: "portable" or "reference"; None selects one.

    NaN stays NaN in fp8, and a computed scale becomes NaN; in int8 with a given scale NaN becomes 0.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device; inconsistent arguments.
    """
    checks.tensor("key", key, ("T", "h_kv", "d"), checks.FLOAT_DTYPES, may_be_empty=1)
    tokens, heads, width = key.shape
    device = key.device
    checks.tensor("value", value, (tokens, heads, "d_v"), (key.dtype,), device)
    k_cache = _check_cache("k_cache", k_cache, key, (key.dtype, *LARGEST), split=True)
    v_cache = _check_cache("v_cache", v_cache, value, (k_cache.dtype,))
    if v_cache.shape[:2] != k_cache.shape[:2]:
        raise ValueError(
            f"v_cache must have k_cache's {k_cache.shape[0]} pages of {k_cache.shape[1]} tokens, "
            f"got {v_cache.shape[0]} of {v_cache.shape[1]}"
        )
    check_slots(slot_mapping, k_cache, "key", tokens)
    k_scale, k_scale_value = _check_scale("k_scale", k_scale, k_cache)
    v_scale, v_scale_value = _check_scale("v_scale", v_scale, v_cache)
    call = dispatch.CallSpec(
        OPERATION, device, key.dtype, page_size=k_cache.shape[1], head_dim=width, head_dim_v=value.shape[2], h_kv=heads
    )
    gradients.warn_if_dropped(OPERATION, key, value)
    backend = dispatch.select(call, backend)
    if slot_mapping.shape[0]:
        params = ReshapeAndCacheParams(
            key=key,
            value=value,
            k_cache=k_cache,
            v_cache=v_cache,
            slot_mapping=slot_mapping,
            k_scale=k_scale,
            k_scale_value=k_scale_value,
            v_scale=v_scale,
            v_scale_value=v_scale_value,
        )
        _reshape_and_cache(params, backend)


@register_op(OPERATION, mutates=("k_cache", "v_cache", "k_scale", "v_scale"))
@dispatch.implemented(OPERATION, portable=_refuses_portable)
def _reshape_and_cache(params: ReshapeAndCacheParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.reshape_and_cache.portable import reshape_and_cache
    else:
        from flashlatte.ops.reshape_and_cache.reference import reshape_and_cache

    reshape_and_cache(params)


def _check_cache(
    name: str, cache: torch.Tensor, rows: torch.Tensor, dtypes: tuple[torch.dtype, ...], split: bool = False
) -> torch.Tensor:
    """Check a cache; returns it with rows split over the last two axes, the last of them contiguous."""
    heads, width = rows.shape[1:]
    if split and checks.is_strided(cache) and cache.dim() == 5:
        x = max(cache.shape[4], 1)
        shape = ("pages", "page_size", heads, width // x, x if width % x == 0 else width)
        return checks.output(name, cache, shape, dtypes, rows.device)
    checks.output(name, cache, ("pages", "page_size", heads, width), dtypes, rows.device, unit_last_stride=False)
    return cache.unsqueeze(3) if cache.stride(3) == 1 or width == 1 else cache.unsqueeze(4)


def _check_scale(
    name: str, scale: float | torch.Tensor | None, cache: torch.Tensor
) -> tuple[torch.Tensor | None, float]:
    """The scale as (tensor [1], [h_kv] or [pages, page_size, h_kv], 1.0), or as (None, number)."""
    if scale is not None and cache.dtype not in LARGEST:
        raise ValueError(
            f"{name} belongs to a cache in {checks.dtype_names(LARGEST)}, and this one is "
            f"{checks.dtype_names([cache.dtype])}"
        )
    if checks.is_strided(scale) and (scale.numel() != 1 or scale.dim() == 3):
        shape = cache.shape[:3]
        if scale.shape not in (shape, shape[2:]):
            raise ValueError(
                f"{name} must have one element or shape [{shape[2]}] or {list(shape)}, got {list(scale.shape)}"
            )
        check = checks.output if scale.dim() == 3 else checks.tensor
        check(name, scale, tuple(scale.shape), (torch.float32,), cache.device, unit_last_stride=False)
        return scale, 1.0
    tensor, value = scales.split(name, scale, cache.device)
    return (None if tensor is None else tensor.reshape(1)), value
