"""Caches for rows of a known width, of latents or of index keys."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashlatte.kv_cache.codec import as_cache, check_scale_rounding
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.index_formats import HEAD_DIMS, INDEX_FORMATS, as_index_cache
from flashlatte.kv_cache.registry import as_format, format_class, names_of
from flashlatte.runtime import checks
from flashlatte.runtime.dispatch import CallSpec


def as_row_cache(
    cache: object, cache_format: str | CacheFormat | None, head_dim: int, scale_rounding: str, device: torch.device
) -> tuple[torch.Tensor, CacheFormat]:
    """Check a cache [pages, page_size, 1, width] (or without the 1) to write rows of ``head_dim`` values to.

    If no format is given, one-byte caches for rows of 32, 64 or 128 values are index-key caches.

    Returns:
        The cache with four axes, and its format.

    Raises:
        TypeError, ValueError: not a cache on ``device``, a format for other rows, or one that does not support the
            scale rounding.
    """
    if isinstance(cache_format, str):
        cache_format = as_format(cache_format, head_dim)
    one_byte = checks.is_strided(cache) and cache.dtype.itemsize == 1
    if cache_format is None and one_byte and head_dim in HEAD_DIMS:
        cache, layout = as_index_cache(cache, head_dim)
    else:
        cache, layout = as_cache(cache, cache_format)
    if layout.head_dim != head_dim:
        raise ValueError(f"cache of format {layout.name} must take rows of {head_dim}, got {layout.head_dim}")
    check_scale_rounding(layout, scale_rounding)
    checks.writable("cache", cache)
    if cache.device != device:
        raise ValueError(f"cache must be on {device} like the other arguments, got {cache.device}")
    return cache, layout


def encode_rows(layout: CacheFormat, x: torch.Tensor, scale_rounding: str) -> tuple[torch.Tensor, ...]:
    """Quantize rows [..., head_dim] to one tensor [..., width] for each of the format's planes."""
    latent_dim = layout.latent_dim
    return layout.encode(x[..., :latent_dim], x[..., latent_dim:], 1.0, scale_rounding)


def refuses_format(call: CallSpec, accepts: Callable[[type[CacheFormat]], bool], others: str = "") -> str | None:
    """Why an implementation does not support the call's cache format, or None. ``others``: other supported caches."""
    if call.cache_format is None or accepts(format_class(call.cache_format)):
        return None
    return f"takes caches in {names_of(accepts)}{others}, not {call.cache_format}"


def is_plain_or_scaled(layout: type[CacheFormat]) -> bool:
    """Whether rows are stored without scales, or with a scale per tile or per block."""
    return layout.plain or layout.tiling is not None or layout.block_scaling is not None


def refuses_rows(call: CallSpec) -> str | None:
    """Why ``kernels.triton.cache_row`` cannot write the call's rows to its cache, or None."""
    width = call.head_dim
    if width is not None and (width & (width - 1) or not 16 <= width <= 1024):
        return f"takes rows of a power of two of 16 to 1024 values, not {width}"
    if call.cache_format in INDEX_FORMATS:
        return None
    return refuses_format(call, _is_stored, " and those of index keys")


def _is_stored(layout: type[CacheFormat]) -> bool:
    if layout.tiling is not None:
        return layout.tiling.e8m0
    if layout.block_scaling is not None:
        return layout.block_scaling.block * layout.block_scaling.blocks == layout.head_dim
    return layout.plain and not layout.takes_scale
