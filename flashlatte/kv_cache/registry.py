"""Lookup of formats by name, or by a tensor's dtype and width."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.index_formats import INDEX_FORMATS
from flashlatte.kv_cache.model1 import Model1Format
from flashlatte.kv_cache.nvfp4 import Nvfp4Format
from flashlatte.kv_cache.plain import Bf16Format, Fp8Format, Fp16Format, Fp32Format
from flashlatte.kv_cache.v32 import V32Format, V32NoRopeFormat
from flashlatte.kv_cache.v41 import V41Format, V41Fp4Format
from flashlatte.runtime import checks

FORMATS: dict[str, type[CacheFormat]] = {
    cls.name: cls
    for cls in (
        Bf16Format,
        Fp16Format,
        Fp32Format,
        Fp8Format,
        V32Format,
        V32NoRopeFormat,
        Model1Format,
        V41Format,
        V41Fp4Format,
        Nvfp4Format,
    )
}
FORMAT_NAMES = tuple(FORMATS)
# The default format of DeepSeek-V4's keys and compressed groups.
DEEPSEEK_V4_FORMAT = Model1Format.name
# FlashMLA's names of its formats, the values of its argument kv_format. V4.1's pages are those of FlashMLA's release of
# September 2026; in earlier ones, all scales of a page followed all of its values.
FLASH_MLA_REARRANGED = {"V41": V41Format.name, "V41_FP4": V41Fp4Format.name}
FLASH_MLA_FORMATS = {
    "V32": V32Format.name,
    "V32_NO_ROPE": V32NoRopeFormat.name,
    "V4": Model1Format.name,
    **FLASH_MLA_REARRANGED,
}
_PLAIN_BY_DTYPE = {cls.record_dtype: cls for cls in FORMATS.values() if cls.plain}
_OF_FIXED_WIDTH = tuple(cls() for cls in FORMATS.values() if not cls.plain)


def as_format(cache_format: str | CacheFormat, head_dim: int | None = None) -> CacheFormat:
    """The format of this name; a ``CacheFormat`` is returned unchanged.

    Args:
        cache_format: a name of ``FORMAT_NAMES`` or of an index cache ("index_fp8", …), or a format.
        head_dim: width of a row, variable in bf16, fp16, fp32, fp8 and index keys, fixed in other formats; None: the
            format's default.

    Raises:
        ValueError: an unknown name, or a head_dim that the format does not support.
    """
    if isinstance(cache_format, CacheFormat):
        if head_dim is not None and head_dim != cache_format.head_dim:
            raise ValueError(
                f"head_dim must be {cache_format.head_dim} as in the given {cache_format.name} format, got {head_dim}"
            )
        return cache_format
    cls = format_class(cache_format)
    return cls() if head_dim is None else cls(head_dim=head_dim)


def format_of_rows(cache_format: str | CacheFormat, latent_dim: int, rope_dim: int) -> CacheFormat:
    """The format for a model's rows [latent | rope].

    Raises:
        ValueError: an unknown format, or one for rows of other widths; the message lists the accepted formats.
    """
    layout = as_format(cache_format)
    if layout.plain:
        return as_format(layout.name, latent_dim + rope_dim)
    if (layout.latent_dim, layout.rope_dim) != (latent_dim, rope_dim):
        fixed = (one.name for one in _OF_FIXED_WIDTH if (one.latent_dim, one.rope_dim) == (latent_dim, rope_dim))
        fitting = [*(name for name, cls in FORMATS.items() if cls.plain), *fixed]
        raise ValueError(
            f"cache_format {layout.name!r} stores kv_lora_rank {layout.latent_dim} and qk_rope_head_dim "
            f"{layout.rope_dim}, and the model has {latent_dim} and {rope_dim}: accepted for it are "
            f"{' and '.join(fitting)}"
        )
    return layout


def format_class(name: str) -> type[CacheFormat]:
    """The class of the format of this name, with the attributes that do not depend on a head_dim."""
    cls = FORMATS.get(name) or INDEX_FORMATS.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"cache_format must be one of {', '.join((*FORMATS, *INDEX_FORMATS))}, got {name!r}")
    return cls


def infer_format(cache: torch.Tensor, name: str = "cache", rows: tuple[int, int] | None = None) -> CacheFormat:
    """The format of a cache tensor, identified by its dtype and last dimension.

    bf16, fp16 and float32 caches have the plain format of their dtype and width. One-byte caches are ``v32`` (656
    wide), ``model1`` (584), in uint8 or int8 ``v41_fp4`` (288) and ``nvfp4_ds_mla`` (352), and in
    float8_e4m3fn of any other width ``fp8``. A width of 528 is ambiguous without ``rows``: ``v41`` or ``v32_no_rope``.

    Args:
        cache: [..., width].
        name: the argument's name in an error.
        rows: latent and RoPE dims of the rows in the cache, which distinguish formats of the same width.

    Raises:
        TypeError, ValueError: not a tensor with a last dimension; no format has this dtype and width, or two have.
    """
    if checks.given(name, cache).dim() == 0:
        raise ValueError(f"{name} must have at least one axis, got a scalar")
    width = cache.shape[-1]
    layouts = formats_of_width(cache)
    if rows is not None:
        fitting = [layout for layout in layouts if (layout.latent_dim, layout.rope_dim) == rows]
        layouts = fitting if fitting or cache.dtype in _PLAIN_BY_DTYPE else layouts
    if len(layouts) > 1:
        raise ValueError(
            f"{name} is {width} bytes wide, which is ambiguous: cache_format must be given, "
            f"{checks.join_or(repr(layout.name) for layout in layouts)}"
        )
    if layouts:
        return layouts[0]
    if cache.dtype in _PLAIN_BY_DTYPE:
        return plain_format(cache.dtype, width)
    raise ValueError(
        f"{name} must be a bfloat16, float16 or float32 cache, a float8_e4m3fn cache (fp8), or a one-byte cache "
        f"{checks.join_or(f'{one.record_width} ({one.name})' for one in _OF_FIXED_WIDTH)} wide; "
        f"got {str(cache.dtype).removeprefix('torch.')} {width} wide"
    )


def formats_of_width(cache: torch.Tensor) -> list[CacheFormat]:
    """The formats of a cache's dtype and width; none if a plain format may have that width."""
    return [
        layout
        for layout in _OF_FIXED_WIDTH
        if cache.shape[-1] == layout.record_width
        and cache.dtype in (layout.accepted_dtypes if layout.inferred_dtypes is None else layout.inferred_dtypes)
    ]


def plain_format(dtype: torch.dtype, head_dim: int | None = None) -> CacheFormat:
    """The plain format of this dtype for rows of ``head_dim`` elements; 576 if None."""
    if dtype not in _PLAIN_BY_DTYPE:
        raise ValueError(f"dtype must be {checks.dtype_names(_PLAIN_BY_DTYPE)}, got {checks.dtype_names([dtype])}")
    cls = _PLAIN_BY_DTYPE[dtype]
    return cls() if head_dim is None else cls(head_dim=head_dim)


def names_of(accepts: Callable[[type[CacheFormat]], bool]) -> str:
    """The names of the formats for which ``accepts`` is true, for messages: "bf16, fp16 or fp32"."""
    return checks.join_or(name for name, cls in FORMATS.items() if accepts(cls))
