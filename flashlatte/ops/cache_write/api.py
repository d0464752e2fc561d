"""``cache_write``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.kv_cache import scales
from flashlatte.kv_cache.codec import as_cache, check_scale_rounding, format_for_rows, one_scale, split_rows
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.row_caches import is_plain_or_scaled, refuses_format
from flashlatte.kv_cache.slots import check_slots
from flashlatte.ops.cache_write.reference import CacheWriteParams
from flashlatte.runtime import checks, dispatch, gradients, refusals
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "cache_write"


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    return refusals.triton(call) or refuses_format(call, is_plain_or_scaled)


@repeats_launches
def cache_write(
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    x: torch.Tensor,
    *,
    rope: torch.Tensor | None = None,
    cache_format: str | CacheFormat | None = None,
    scale: float | torch.Tensor | None = None,
    scale_rounding: str = "power_of_two",
    request_ids: torch.Tensor | None = None,
    page_indices: torch.Tensor | None = None,
    page_indptr: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Quantize new tokens to a paged cache's format and write them to the cache in place.

    Args:
        cache: [pages, page_size, 1, width] (or without the 1).
        slot_mapping: int32 or int64 [n], page · page_size + offset of each token. A token whose slot is outside the
            cache is skipped. Slots must differ from each other.
        x: [T, head_dim] rows, or [T, latent_dim] latents if ``rope`` is given; T ≥ n, tokens from n on are padding and
            are not read. bf16, fp16 or float32. n and T may be 0.
        rope: [T, 64] rotated dims, or [T, 0] for a format without.
        cache_format: None infers it from the cache.
        scale: for format ``fp8``: a number, or a one-element float32 tensor on the cache's device; default 1.
        scale_rounding: for formats ``v32`` and ``v32_no_rope``: "power_of_two" or "exact".
        request_ids: int32 or int64 [n], the request of each token; ``slot_mapping`` then has positions in requests
            instead of slots. Only for formats without scales, and ``fp8``. Any strides, as for the next two.
        page_indices, page_indptr: with ``request_ids``: int32 or int64 [entries] and [b + 1]. The pages of request r
            are page_indices[page_indptr[r] : page_indptr[r + 1]]. Tokens of a request that does not exist, behind its
            pages, or in a page outside the cache are skipped.
        backend: "portable" or "reference"; None selects one.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    cache, layout = as_cache(cache, cache_format)
    checks.writable("cache", cache)
    device = cache.device
    checks.tensor("x", x, ("T", "width"), checks.FLOAT_DTYPES, device, may_be_empty=1)
    if rope is not None:
        checks.tensor("rope", rope, ("T", "width"), (x.dtype,), device, may_be_empty=2)
    format_for_rows(layout, x, rope)
    split_rows(layout, x, rope)
    if rope is not None and rope.shape[1] == 0:
        rope = None
    check_scale_rounding(layout, scale_rounding)
    if request_ids is None:
        for name, value in (("page_indices", page_indices), ("page_indptr", page_indptr)):
            if value is not None:
                raise ValueError(f"{name} must be None without request_ids, got a tensor")
        check_slots(slot_mapping, cache, "x", x.shape[0])
    else:
        _check_requests(slot_mapping, request_ids, page_indices, page_indptr, layout, x)
    scale_tensor, scale_value = scales.split("scale", one_scale(layout, scale), device)
    gradients.warn_if_dropped(OPERATION, x, rope)
    call = dispatch.CallSpec(OPERATION, device, x.dtype, layout.name, cache.shape[1], layout.head_dim)
    backend = dispatch.select(call, backend)
    if slot_mapping.shape[0] == 0:
        return
    params = CacheWriteParams(
        cache=cache,
        slot_mapping=slot_mapping,
        x=x,
        rope=rope,
        cache_format=layout.name,
        head_dim=layout.head_dim,
        scale_tensor=scale_tensor,
        scale_value=scale_value,
        scale_rounding=scale_rounding,
        request_ids=request_ids,
        page_indices=page_indices,
        page_indptr=page_indptr,
    )
    _cache_write(params, backend)


def _check_requests(
    positions: torch.Tensor,
    request_ids: torch.Tensor,
    page_indices: torch.Tensor | None,
    page_indptr: torch.Tensor | None,
    layout: CacheFormat,
    x: torch.Tensor,
) -> None:
    if not layout.plain:
        raise ValueError(f"request_ids must be None for cache format {layout.name}, got a tensor")
    tokens, device = x.shape[0], x.device
    checks.indices("slot_mapping", positions, ("n",), device, may_be_empty=1)
    if positions.shape[0] > tokens:
        raise ValueError(f"slot_mapping must not be longer than x ({tokens} tokens), got {positions.shape[0]}")
    checks.indices("request_ids", request_ids, tuple(positions.shape), device, may_be_empty=1)
    checks.indices("page_indices", page_indices, ("entries",), device, may_be_empty=1)
    checks.indices("page_indptr", page_indptr, ("b + 1",), device)


@register_op(OPERATION, mutates=("cache",))
@dispatch.implemented(OPERATION, portable=_refuses_portable)
def _cache_write(params: CacheWriteParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.cache_write.portable import cache_write
    else:
        from flashlatte.ops.cache_write.reference import cache_write

    cache_write(params)
