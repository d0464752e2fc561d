"""Allocation of caches, and quantization and dequantization of whole caches and of token records."""

from __future__ import annotations

import torch

from flashlatte.kv_cache import allocation, scales
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.fp8 import SCALE_ROUNDINGS
from flashlatte.kv_cache.registry import as_format, infer_format
from flashlatte.runtime import checks


def allocate(
    cache_format: str | CacheFormat,
    num_pages: int,
    page_size: int,
    *,
    head_dim: int | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """A zeroed paged cache.

    Args:
        cache_format: "bf16", "fp16", "fp32", "fp8", "v32", "v32_no_rope", "model1", "v41", "v41_fp4", "nvfp4_ds_mla",
            or a ``CacheFormat``.
        num_pages: pages in the cache.
        page_size: tokens in a page, any number from 1.
        head_dim: width of a row; 576 by default (512 for ``v32_no_rope``, ``model1``, ``v41`` and
            ``v41_fp4``). Other widths only in formats that store no scales.
        device: torch's default device if None.

    Returns:
        [num_pages, page_size, 1, width] in the format's dtype (uint8 for those with scales: ``v32`` is 656 wide,
        ``v32_no_rope`` 528, ``model1`` 584, ``v41`` 528, ``v41_fp4`` 288, ``nvfp4_ds_mla`` 352). Pages of ``model1``
        are padded to a multiple of 576 bytes, so its page stride is larger than a page. Its scales follow all rows of
        a page, so a view of a part of each page (``cache[:, :n]``, or another page size) is not a valid cache.

    Raises:
        TypeError, ValueError: an unknown format, a size below 1, a cache of 2^63 bytes or more, a head_dim that the
            format does not support, or an unavailable device.
        torch.OutOfMemoryError: the device has too little memory; the message gives pages and GiB.
    """
    layout = as_format(cache_format, None if head_dim is None else checks.positive_int("head_dim", head_dim))
    num_pages = checks.positive_int("num_pages", num_pages)
    page_size = checks.positive_int("page_size", page_size)
    page_stride = layout.page_bytes(page_size) // layout.record_dtype.itemsize
    width, device = layout.record_width, checks.device("device", device)
    if num_pages * page_stride * layout.record_dtype.itemsize >= 2**63:
        raise ValueError(f"num_pages must make a cache of less than 2^63 bytes, got {num_pages} of {page_size} tokens")
    shape = (num_pages * page_stride,)
    storage = allocation.zeros(shape, layout.record_dtype, device, num_pages, page_size, layout.name)
    return storage.as_strided((num_pages, page_size, 1, width), (page_stride, width, width, 1))


def quantize(
    x: torch.Tensor,
    cache_format: str | CacheFormat,
    *,
    rope: torch.Tensor | None = None,
    scale: float | torch.Tensor | None = None,
    scale_rounding: str = "power_of_two",
) -> torch.Tensor:
    """Quantize rows to token records: each record is the concatenation of the token's planes.

    Args:
        x: [..., head_dim] rows, or [..., latent_dim] latents if ``rope`` is given; bf16, fp16 or float32.
        cache_format: a format or its name.
        rope: [..., 64] rotated dims, stored unchanged as bf16 by ``v32`` and ``model1``.
        scale: the per-tensor scale of format ``fp8`` (default 1); an error for other formats.
        scale_rounding: "power_of_two" rounds scales up as FlashMLA's quantizer does; "exact" keeps amax / 448, in
            ``v32`` and ``v32_no_rope``. Other formats have a single rounding.

    Returns:
        [..., width] in the format's dtype.

    Raises:
        TypeError, ValueError: an unknown format or rounding, or rows whose dtype or width the format does not accept.
    """
    layout = format_for_rows(cache_format, x, rope)
    check_scale_rounding(layout, scale_rounding)
    latent, rope = split_rows(layout, x, rope)
    planes = layout.encode(latent, rope, one_scale(layout, scale), scale_rounding)
    return torch.cat(planes, dim=-1)


def dequantize(
    records: torch.Tensor,
    cache_format: str | CacheFormat | None = None,
    *,
    scale: float | torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Dequantize token records [..., width], the result of ``quantize``, to rows [..., head_dim].

    Args:
        cache_format: the records' format; inferred from their dtype and width if None.
        scale: the per-tensor scale of format ``fp8`` that ``quantize`` used.
        dtype: dtype of the result: bf16, fp16 or float32.

    Raises:
        TypeError, ValueError: an unknown format, or records whose dtype or width differs from the format's.
    """
    layout = format_of_records(records, cache_format, "records")
    check_float_dtype(dtype)
    planes = records.view(layout.record_dtype).split([plane.width for plane in layout.planes], dim=-1)
    return layout.decode(tuple(planes), one_scale(layout, scale)).to(dtype)


def pack(
    rows: torch.Tensor,
    cache_format: str | CacheFormat,
    *,
    scale: float | torch.Tensor | None = None,
    scale_rounding: str = "power_of_two",
) -> torch.Tensor:
    """Quantize the rows of a whole cache to a new cache, allocated as by ``allocate``.

    Args:
        rows: [pages, page_size, 1, head_dim], bf16, fp16 or float32.
        cache_format, scale, scale_rounding: as for ``quantize``.

    Returns:
        [pages, page_size, 1, width] in the format's dtype, on the device of ``rows``.

    Raises:
        TypeError, ValueError: as ``quantize``.
    """
    checks.tensor("rows", rows, ("pages", "page_size", 1, "head_dim"), checks.FLOAT_DTYPES)
    layout = format_for_rows(cache_format, rows, None)
    check_scale_rounding(layout, scale_rounding)
    cache = allocate(layout, rows.shape[0], rows.shape[1], device=rows.device)
    with checks.naming(x="rows"):
        latent, rope = split_rows(layout, rows.squeeze(2), None)
    planes = layout.encode(latent, rope, one_scale(layout, scale), scale_rounding)
    for view, plane in zip(layout.page_views(cache), planes, strict=True):
        view.copy_(plane)
    return cache


def unpack(
    cache: torch.Tensor,
    cache_format: str | CacheFormat | None = None,
    *,
    scale: float | torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Dequantize a whole cache; the inverse of ``pack``.

    Args:
        cache: [pages, page_size, 1, width] or [pages, page_size, width].
        cache_format, scale, dtype: as for ``dequantize``.

    Returns:
        [pages, page_size, 1, head_dim] in ``dtype``.

    Raises:
        TypeError, ValueError: an unknown format, or a cache whose dtype, width or strides do not fit the format.
    """
    cache, layout = as_cache(cache, cache_format)
    check_float_dtype(dtype)
    rows = layout.decode(layout.page_views(cache), one_scale(layout, scale))
    return rows.to(dtype).unsqueeze(2)


def as_cache(
    cache: object,
    cache_format: str | CacheFormat | None,
    name: str = "cache",
    rows: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, CacheFormat]:
    """Check a cache [pages, page_size, 1, width] or [pages, page_size, width]; returns it 4-D with its format.

    Args:
        cache_format: inferred from the cache, and from ``rows`` if they are given, if None.
        rows: latent and RoPE dims of the rows.
    """
    cache = checks.given(name, cache)
    if cache.dim() == 3:
        cache = cache.unsqueeze(2)
    layout = format_of_records(cache, cache_format, name, rows)
    width = layout.record_width
    checks.tensor(name, cache, ("pages", "page_size", 1, width), layout.accepted_dtypes)
    if not layout.plain and cache.shape[1] > 1 and cache.stride(1) != width:
        raise ValueError(
            f"{name} of format {layout.name} must have a token stride of {width} bytes, got {cache.stride(1)}"
        )
    if not layout.plain and cache.shape[0] > 1 and cache.stride(0) < width * cache.shape[1]:
        raise ValueError(
            f"{name} of format {layout.name} must have a page stride of at least {width * cache.shape[1]} bytes, "
            f"got {cache.stride(0)}"
        )
    return cache, layout


def format_of_records(
    records: object, cache_format: str | CacheFormat | None, name: str, rows: tuple[int, int] | None = None
) -> CacheFormat:
    """The given or inferred format, checked against the width and dtype of records or of a cache."""
    records = checks.given(name, records)
    if records.dim() == 0:
        raise ValueError(f"{name} must have at least one axis, got a scalar")
    if records.shape[-1] == 0:
        raise ValueError(f"{name} must have rows of at least one element, got shape {list(records.shape)}")
    if cache_format is None:
        return infer_format(records, name, rows)
    if isinstance(cache_format, str):
        layout = as_format(cache_format)
        if layout.plain:
            layout = as_format(cache_format, records.shape[-1])
    else:
        layout = as_format(cache_format)
    if records.dtype not in layout.accepted_dtypes:
        raise TypeError(
            f"{name} of format {layout.name} must be {checks.dtype_names(layout.accepted_dtypes)}, "
            f"got {checks.dtype_names([records.dtype])}"
        )
    if records.shape[-1] != layout.record_width:
        raise ValueError(f"{name} of format {layout.name} must be {layout.record_width} wide, got {records.shape[-1]}")
    return layout


def format_for_rows(cache_format: str | CacheFormat, x: torch.Tensor, rope: torch.Tensor | None) -> CacheFormat:
    """The format for these rows; its width is the rows' width if it is plain."""
    for name, value in (("x", x), *([] if rope is None else [("rope", rope)])):
        checks.given(name, value)
        if value.dtype not in checks.FLOAT_DTYPES:
            raise TypeError(
                f"{name} must be {checks.dtype_names(checks.FLOAT_DTYPES)}, got {checks.dtype_names([value.dtype])}"
            )
        if value.dim() == 0:
            raise ValueError(f"{name} must have at least one axis, got a scalar")
    layout = as_format(cache_format)
    if isinstance(cache_format, str) and layout.plain:
        layout = as_format(cache_format, x.shape[-1] + (0 if rope is None else rope.shape[-1]))
    return layout


def split_rows(layout: CacheFormat, x: torch.Tensor, rope: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent and rope parts of whole rows, or of rows given in these two parts."""
    if rope is None:
        if x.shape[-1] != layout.head_dim:
            raise ValueError(
                f"x must be {layout.head_dim} wide for format {layout.name} (or {layout.latent_dim} if rope is given), "
                f"got {x.shape[-1]}"
            )
        return x[..., : layout.latent_dim], x[..., layout.latent_dim :]
    if x.shape[:-1] != rope.shape[:-1] or x.device != rope.device:
        raise ValueError(
            f"rope must have x's leading shape {list(x.shape[:-1])} and device {x.device}, "
            f"got {list(rope.shape[:-1])} on {rope.device}"
        )
    widths = (x.shape[-1], rope.shape[-1])
    if sum(widths) != layout.head_dim or (not layout.plain and widths[1] != layout.rope_dim):
        raise ValueError(
            f"x and rope must be {layout.latent_dim} and {layout.rope_dim} wide for format {layout.name}, "
            f"got {widths[0]} and {widths[1]}"
        )
    return x, rope


def check_float_dtype(dtype: object) -> None:
    """Check the dtype that rows are dequantized to."""
    if dtype not in checks.FLOAT_DTYPES:
        raise TypeError(f"dtype must be {checks.dtype_names(checks.FLOAT_DTYPES)}, got {dtype}")


def check_scale_rounding(layout: CacheFormat, scale_rounding: str) -> None:
    checks.choice("scale_rounding", scale_rounding, SCALE_ROUNDINGS)
    if scale_rounding == "exact" and not layout.has_exact_scales:
        raise ValueError(f"scale_rounding must be 'power_of_two' for format {layout.name}, got 'exact'")


def one_scale(layout: CacheFormat, value: float | torch.Tensor | None) -> float | torch.Tensor:
    """The scale of a per-tensor format (1 if None); an error if the format has no such scale."""
    if value is not None and not layout.takes_scale:
        raise ValueError(f"scale must be None for format {layout.name} (only fp8 has one), got {value!r}")
    return scales.check("scale", value)
