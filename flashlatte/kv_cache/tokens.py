"""Tokens in and out of a paged cache: write by slot, read by slot, gather by block table."""

from __future__ import annotations

import torch

from flashlatte import checks, dispatch
from flashlatte.kv_cache import scales
from flashlatte.kv_cache.codec import (
    as_cache,
    check_scale_rounding,
    format_for_rows,
    one_scale,
    split_rows,
)
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.registry import as_format
from flashlatte.repeat import repeats_launches
from flashlatte.torch_op import register_op

for _operation in ("kv_cache.write", "kv_cache.gather"):
    _function = _operation.partition(".")[2]
    dispatch.register(
        _operation,
        dispatch.Implementation(
            "portable", f"flashlatte.kv_cache.portable:{_function}", checks.FLOAT_DTYPES, needs_triton=True
        ),
        dispatch.Implementation("reference", f"flashlatte.kv_cache.reference:{_function}", checks.FLOAT_DTYPES),
    )


@repeats_launches
def write(
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    x: torch.Tensor,
    *,
    rope: torch.Tensor | None = None,
    cache_format: str | CacheFormat | None = None,
    scale: float | torch.Tensor | None = None,
    scale_rounding: str = "power_of_two",
    backend: str | None = None,
) -> None:
    """Write new tokens into a paged cache, in place, quantising them to its format.

    Args:
        cache: [pages, page_size, 1, width] (or without the 1).
        slot_mapping: int32 or int64 [n], page · page_size + offset of each token. A slot below 0 or beyond the
            cache skips its token. Slots must differ from each other.
        x: [T, head_dim] rows, or [T, latent_dim] latents if ``rope`` is given; T ≥ n, tokens from n on are
            padding and are not looked at. bf16, fp16 or float32.
        rope: [T, 64] rotated dims.
        cache_format: inferred from the cache if None.
        scale: format ``fp8``: a number, or a one-element float32 tensor on the cache's device; default 1.
        scale_rounding: format ``v32``: "power_of_two" or "exact".
        backend: "portable" or "reference"; None chooses.

    Raises:
        TypeError, ValueError: arguments of a wrong type, dtype, shape or device, or that contradict each other.
    """
    cache, layout = as_cache(cache, cache_format)
    device = cache.device
    # A step without new tokens is one like any other.
    tokens = 0 if isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape[0] == 0 else "T"
    checks.tensor("x", x, (tokens, "width"), checks.FLOAT_DTYPES, device)
    if rope is not None:
        checks.tensor("rope", rope, (tokens, "width"), (x.dtype,), device)
    format_for_rows(layout, x, rope)
    split_rows(layout, x, rope)
    check_scale_rounding(layout, scale_rounding)
    if isinstance(slot_mapping, torch.Tensor) and slot_mapping.dim() == 1 and slot_mapping.numel() == 0:
        return
    checks.tensor("slot_mapping", slot_mapping, ("n",), checks.INDEX_DTYPES, device, unit_last_stride=False)
    if slot_mapping.shape[0] > x.shape[0]:
        raise ValueError(f"slot_mapping must not be longer than x ({x.shape[0]} tokens), got {slot_mapping.shape[0]}")
    scale_tensor, scale_value = scales.split("scale", one_scale(layout, scale), device)
    call = dispatch.Call("kv_cache.write", device, x.dtype, layout.name, cache.shape[1], layout.head_dim)
    backend = dispatch.select(call, backend)
    _write(
        cache,
        slot_mapping,
        x,
        rope,
        layout.name,
        layout.head_dim,
        scale_tensor,
        scale_value,
        scale_rounding,
        backend,
    )


@register_op("kv_cache_write", mutates=("cache",))
def _write(
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    x: torch.Tensor,
    rope: torch.Tensor | None,
    cache_format: str,
    head_dim: int,
    scale_tensor: torch.Tensor | None,
    scale_value: float,
    scale_rounding: str,
    backend: str,
) -> None:
    run = dispatch.implementation("kv_cache.write", backend)
    layout = as_format(cache_format, head_dim)
    run(cache, slot_mapping, x, rope, layout, scale_tensor, scale_value, scale_rounding)


def gather(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    cache_format: str | CacheFormat | None = None,
    scale: float | torch.Tensor | None = None,
    seq_starts: torch.Tensor | None = None,
    total_tokens: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Copy the tokens of several requests out of a paged cache into one contiguous latent, dequantised.

    Args:
        cache: [pages, page_size, 1, width] (or without the 1).
        block_table: int32 or int64 [b, max_pages], the pages of each request in order.
        cu_seqlens: int32 or int64 [b + 1]: request i goes to rows cu_seqlens[i] to cu_seqlens[i + 1].
        cache_format: inferred from the cache if None.
        scale: format ``fp8``: a number, or a one-element float32 tensor on the cache's device; default 1.
        seq_starts: int32 or int64 [b], the token of each request to begin with; 0 if None.
        total_tokens: rows of the result. If None and ``out`` is None, cu_seqlens[b] is read from the device,
            which synchronises.
        dtype: of the result, if ``out`` is None.
        out: [rows, head_dim], bf16, fp16 or float32, with last stride 1. Rows from cu_seqlens[b] on are left.
        backend: "portable" or "reference"; None chooses.

    Returns:
        [total_tokens, head_dim] in ``dtype``, or ``out``. A token whose page is not in the table or not in the
        cache comes back as zeros.

    Raises:
        TypeError, ValueError: arguments of a wrong type, dtype, shape or device, or that contradict each other.
    """
    cache, layout = as_cache(cache, cache_format)
    device = cache.device
    checks.tensor("block_table", block_table, ("b", "max_pages"), checks.INDEX_DTYPES, device)
    requests = block_table.shape[0]
    checks.tensor("cu_seqlens", cu_seqlens, (requests + 1,), checks.INDEX_DTYPES, device, unit_last_stride=False)
    if seq_starts is not None:
        checks.tensor("seq_starts", seq_starts, (requests,), checks.INDEX_DTYPES, device, unit_last_stride=False)
    scale_tensor, scale_value = scales.split("scale", one_scale(layout, scale), device)
    if out is None:
        if dtype not in checks.FLOAT_DTYPES:
            raise TypeError(f"dtype must be {checks.dtype_names(checks.FLOAT_DTYPES)}, got {dtype}")
        rows = int(cu_seqlens[-1]) if total_tokens is None else total_tokens
        if rows < 0:
            raise ValueError(f"total_tokens must be at least 0, got {rows}")
        out = torch.zeros(rows, layout.head_dim, dtype=dtype, device=device)
    else:
        checks.output("out", out, ("rows", layout.head_dim), checks.FLOAT_DTYPES, device)
        if total_tokens is not None and total_tokens != out.shape[0]:
            raise ValueError(f"total_tokens must be out's {out.shape[0]} rows or None, got {total_tokens}")
    if out.shape[0] == 0:
        return out
    call = dispatch.Call("kv_cache.gather", device, out.dtype, layout.name, cache.shape[1], layout.head_dim)
    backend = dispatch.select(call, backend)
    _gather(
        cache,
        block_table,
        cu_seqlens,
        seq_starts,
        layout.name,
        layout.head_dim,
        scale_tensor,
        scale_value,
        out,
        backend,
    )
    return out


@register_op("kv_cache_gather", mutates=("out",))
def _gather(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor | None,
    cache_format: str,
    head_dim: int,
    scale_tensor: torch.Tensor | None,
    scale_value: float,
    out: torch.Tensor,
    backend: str,
) -> None:
    run = dispatch.implementation("kv_cache.gather", backend)
    layout = as_format(cache_format, head_dim)
    run(cache, block_table, cu_seqlens, seq_starts, layout, scale_tensor, scale_value, out)


def read(
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    cache_format: str | CacheFormat | None = None,
    scale: float | torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The rows at ``slots`` (int32 or int64, any shape): [*slots.shape, head_dim] in ``dtype``.

    A slot is page · page_size + offset. A slot below 0 or beyond the cache reads as zeros.
    """
    cache, layout = as_cache(cache, cache_format)
    if not isinstance(slots, torch.Tensor):
        raise TypeError(f"slots must be a tensor, got {type(slots).__name__}")
    if dtype not in checks.FLOAT_DTYPES:
        raise TypeError(f"dtype must be {checks.dtype_names(checks.FLOAT_DTYPES)}, got {dtype}")
    checks.tensor("slots", slots, slots.shape, checks.INDEX_DTYPES, cache.device, unit_last_stride=False)
    return read_slots(cache, slots, layout, one_scale(layout, scale)).to(dtype)


def read_slots(
    cache: torch.Tensor, slots: torch.Tensor, layout: CacheFormat, scale: float | torch.Tensor = 1.0
) -> torch.Tensor:
    """float32 rows [*slots.shape, head_dim] of a checked cache; slots outside it read as zeros."""
    num_pages, page_size = cache.shape[:2]
    valid = (slots >= 0) & (slots < num_pages * page_size)
    safe = torch.where(valid, slots, 0).long()
    page, offset = safe // page_size, safe % page_size
    rows = layout.decode(tuple(view[page, offset] for view in layout.page_views(cache)), scale)
    return torch.where(valid.unsqueeze(-1), rows, 0.0)
