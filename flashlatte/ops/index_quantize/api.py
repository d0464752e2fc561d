"""``index_quantize`` and ``index_gather``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.kv_cache import gather_slots
from flashlatte.kv_cache.fp8 import SCALE_ROUNDINGS
from flashlatte.kv_cache.index_formats import IndexFormat, as_index_cache, check_head_dim
from flashlatte.kv_cache.slots import check_slots
from flashlatte.ops.index_quantize.reference import IndexGatherParams, IndexQuantizeParams
from flashlatte.runtime import checks, dispatch, gradients, refusals
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

QUANTIZE, GATHER = "index_quantize", "index_gather"


@repeats_launches
def index_quantize(
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k: torch.Tensor,
    *,
    scale_rounding: str = "exact",
    backend: str | None = None,
) -> None:
    """Quantize the index keys of new tokens to their paged cache's format and write them in place.

    A token's scale in format ``index_fp8`` is max(amax, 1e-4) / 448 over its values.

    Args:
        cache: [pages, page_size, 1, width] (or without the 1) of the formats ``index_fp8`` (width head_dim + 4),
            ``index_bf16`` or ``index_fp32`` (head_dim) or ``index_mxfp4`` (head_dim / 2 + head_dim / 32), identified by
            dtype and width.
        slot_mapping: int32 or int64 [n], page · page_size + offset of each token. A token whose slot is outside the
            cache is skipped. Slots must differ from each other.
        k: [T, head_dim], bf16, fp16 or float32, head_dim 32, 64 or 128; T ≥ n, tokens from n on are padding.
            n and T may be 0.
        scale_rounding: for format ``index_fp8``: "exact", or "power_of_two" to round scales up (vLLM's ue8m0).
        backend: "portable" or "reference"; None selects one.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    checks.tensor("k", k, ("T", "head_dim"), checks.FLOAT_DTYPES, may_be_empty=1)
    check_head_dim("k", k.shape[1])
    cache, layout = as_index_cache(cache, k.shape[1], device=k.device)
    checks.writable("cache", cache)
    checks.choice("scale_rounding", scale_rounding, SCALE_ROUNDINGS)
    check_slots(slot_mapping, cache, "k", k.shape[0])
    gradients.warn_if_dropped(QUANTIZE, k)
    backend = dispatch.select(dispatch.CallSpec(QUANTIZE, k.device, k.dtype, head_dim=layout.head_dim), backend)
    if slot_mapping.shape[0]:
        params = IndexQuantizeParams(cache, slot_mapping, k[: slot_mapping.shape[0]], scale_rounding)
        _index_quantize(params, backend)


@register_op(QUANTIZE, mutates=("cache",))
@dispatch.implemented(QUANTIZE, portable=refusals.triton)
def _index_quantize(params: IndexQuantizeParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.index_quantize.portable import index_quantize
    else:
        from flashlatte.ops.index_quantize.reference import index_quantize

    index_quantize(params)


def index_gather(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    total_tokens: int,
    *,
    head_dim: int = 128,
    seq_starts: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gather the index keys of several requests from their paged cache to contiguous tensors, still quantized.

    Args:
        cache: as written by ``index_quantize``.
        block_table: int32 or int64 [b, max_pages], the pages of each request in order. b may be 0.
        cu_seqlens: int32 or int64 [b + 1]: request i goes to rows cu_seqlens[i] to cu_seqlens[i + 1]. Or [b]: the last
            request then extends to the end of the result.
        total_tokens: rows of the result.
        head_dim: values of a key.
        seq_starts: int32 or int64 [b], the first token of each request; 0 if None.
        values, scales: tensors to write to, contiguous; rows from cu_seqlens[b] on are not written.
        backend: "portable" or "reference"; None selects one.

    Returns:
        The keys and scales for ``index_logits``: float8_e4m3fn [total_tokens, head_dim] and float32 [total_tokens]
        (``index_fp8``), bf16 or float32 [total_tokens, head_dim] and None (``index_bf16``, ``index_fp32``), or uint8
        [total_tokens, head_dim / 2] and uint8 [total_tokens, head_dim / 32] (``index_mxfp4``). Tokens whose page is not
        in the table or not in the cache, and rows of no request in allocated tensors, are zeros.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    check_head_dim("head_dim", checks.positive_int("head_dim", head_dim))
    cache, layout = as_index_cache(cache, head_dim)
    device = cache.device
    rows = checks.positive_int("total_tokens", total_tokens, or_zero=True)
    gather_slots.check(block_table, cu_seqlens, seq_starts, device)
    values_like, scales_like = gathered_like(layout, rows)
    values = _gathered("values", values, values_like, cache)
    if scales_like is not None:
        scales = _gathered("scales", scales, scales_like, cache)
    elif scales is not None:
        raise ValueError(f"scales must be None for format {layout.name}, which has none, got a tensor")
    gather_slots.check_values(cache, block_table, cu_seqlens, seq_starts, rows)
    backend = dispatch.select(dispatch.CallSpec(GATHER, device, torch.bfloat16, head_dim=head_dim), backend)
    if rows and block_table.shape[0]:
        # torch.library.opcheck does not support float8.
        stored = values.view(torch.uint8) if values.dtype.itemsize == 1 else values
        params = IndexGatherParams(cache, block_table, cu_seqlens, seq_starts, stored, scales, head_dim)
        _index_gather(params, backend)
    return values, scales


@register_op(GATHER, mutates=("stored", "scales"))
@dispatch.implemented(GATHER, portable=refusals.triton)
def _index_gather(params: IndexGatherParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.index_quantize.portable import index_gather
    else:
        from flashlatte.ops.index_quantize.reference import index_gather

    index_gather(params)


def gathered_like(layout: IndexFormat, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys and scales of ``rows`` tokens as ``index_logits`` takes them, on the meta device."""
    if layout.encoding == "e4m3":
        return (
            torch.empty(rows, layout.head_dim, dtype=torch.float8_e4m3fn, device="meta"),
            torch.empty(rows, dtype=torch.float32, device="meta"),
        )
    if layout.scale_bytes == 0:
        return torch.empty(rows, layout.head_dim, dtype=layout.record_dtype, device="meta"), None
    return (
        torch.empty(rows, layout.value_bytes, dtype=torch.uint8, device="meta"),
        torch.empty(rows, layout.scale_bytes, dtype=torch.uint8, device="meta"),
    )


def _gathered(name: str, value: torch.Tensor | None, like: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    if value is None:
        stored = torch.uint8 if like.dtype.itemsize == 1 else like.dtype
        return torch.zeros(like.shape, dtype=stored, device=cache.device).view(like.dtype)
    checks.output(name, value, tuple(like.shape), (like.dtype,), cache.device)
    checks.no_overlap(name, value, cache=cache)
    if not value.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {value.stride()}")
    return value
