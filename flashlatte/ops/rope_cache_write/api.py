"""``rope_cache_write``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.kv_cache import scales
from flashlatte.kv_cache.codec import as_cache, format_for_rows, one_scale
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.row_caches import refuses_format
from flashlatte.kv_cache.slots import check_slots
from flashlatte.ops.rope_cache_write.reference import RopeCacheWriteParams
from flashlatte.runtime import checks, dispatch, gradients, refusals
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "rope_cache_write"


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    return refusals.triton(call) or refuses_format(call, lambda layout: layout.plain)


@repeats_launches
def rope_cache_write(
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    interleaved: bool,
    q_rope: torch.Tensor | None = None,
    cache_format: str | CacheFormat | None = None,
    scale: float | torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Rotate the rope part of new keys and queries in place, and write the keys to a paged cache.

    A pair (a, b) becomes (a cos - b sin, b cos + a sin), in float32, rounded once; the cache stores the rounded values.
    It has no backward pass, and warns once if gradients are enabled and an input requires one.

    Args:
        cache: [pages, page_size, 1, width] (or without the 1), any format of latents, written to.
        slot_mapping: int32 or int64 [n], page · page_size + offset of each token. A token whose slot is outside the
            cache is rotated but not written. Slots must differ from each other.
        latent: [T, latent_dim], bf16, fp16 or float32; T ≥ n, tokens from n on are padding and are not changed. T may
            be 0.
        k_rope: [T, rope_dim] in latent's dtype, rotated in place.
        positions: int32 or int64 [T], the row of cos_sin for each token. Positions outside the table are clamped.
        cos_sin: [positions, rope_dim], bf16, fp16 or float32, the cosines, then the sines of each frequency.
        interleaved: whether a frequency rotates dims 2i and 2i + 1; else i and i + rope_dim / 2.
        q_rope: [T, h, rope_dim] in latent's dtype, rotated in place; may be None.
        cache_format: None infers it from the cache.
        scale: for format ``fp8``: a number, or a one-element float32 tensor on the cache's device; default 1.
        backend: "portable" or "reference"; None selects one.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device; inconsistent arguments.
    """
    cache, layout = as_cache(cache, cache_format)
    checks.writable("cache", cache)
    device = cache.device
    checks.tensor("latent", latent, ("T", "latent_dim"), checks.FLOAT_DTYPES, device, may_be_empty=1)
    tokens, dtype = latent.shape[0], (latent.dtype,)
    checks.output("k_rope", k_rope, (tokens, "rope_dim"), dtype, device)
    rope_dim = k_rope.shape[1]
    if rope_dim % 2:
        raise ValueError(f"k_rope must have an even width, got {rope_dim}")
    format_for_rows(layout, latent, k_rope)
    width = latent.shape[1] + rope_dim
    if width != layout.head_dim or (not layout.plain and rope_dim != layout.rope_dim):
        raise ValueError(
            f"latent and k_rope must be {layout.latent_dim} and {layout.rope_dim} wide for format {layout.name}, got "
            f"{latent.shape[1]} and {rope_dim}"
        )
    if q_rope is not None:
        checks.output("q_rope", q_rope, (tokens, "h", rope_dim), dtype, device)
    checks.indices("positions", positions, (tokens,), device)
    checks.tensor("cos_sin", cos_sin, ("positions", rope_dim), checks.FLOAT_DTYPES, device)
    check_slots(slot_mapping, cache, "latent", tokens)
    checks.flag("interleaved", interleaved)
    scale_tensor, scale_value = scales.split("scale", one_scale(layout, scale), device)
    gradients.warn_if_dropped(OPERATION, latent, k_rope, q_rope)
    heads = 0 if q_rope is None else q_rope.shape[1]
    call = dispatch.CallSpec(OPERATION, device, latent.dtype, layout.name, cache.shape[1], layout.head_dim, h_q=heads)
    backend = dispatch.select(call, backend)
    if slot_mapping.shape[0]:
        params = RopeCacheWriteParams(
            cache=cache,
            slot_mapping=slot_mapping,
            latent=latent,
            k_rope=k_rope,
            q_rope=q_rope,
            positions=positions,
            cos_sin=cos_sin,
            interleaved=interleaved,
            cache_format=layout.name,
            head_dim=layout.head_dim,
            scale_tensor=scale_tensor,
            scale_value=scale_value,
        )
        _rope_cache_write(params, backend)


@register_op(OPERATION, mutates=("cache", "k_rope", "q_rope"))
@dispatch.implemented(OPERATION, portable=_refuses_portable)
def _rope_cache_write(params: RopeCacheWriteParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.rope_cache_write.portable import rope_cache_write
    else:
        from flashlatte.ops.rope_cache_write.reference import rope_cache_write

    rope_cache_write(params)
