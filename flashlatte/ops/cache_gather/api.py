"""``cache_gather``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.kv_cache import gather_slots, scales
from flashlatte.kv_cache.codec import as_cache, check_float_dtype, one_scale
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.row_caches import is_plain_or_scaled, refuses_format
from flashlatte.ops.cache_gather.reference import CacheGatherParams
from flashlatte.runtime import checks, dispatch, refusals, value_checks
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "cache_gather"


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    return refusals.triton(call) or refuses_format(call, is_plain_or_scaled)


@repeats_launches
def cache_gather(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    cache_format: str | CacheFormat | None = None,
    scale: float | torch.Tensor | None = None,
    seq_starts: torch.Tensor | None = None,
    seq_ends: torch.Tensor | None = None,
    total_tokens: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Gather the tokens of several requests from a paged cache to one contiguous latent, dequantized.

    Args:
        cache: [pages, page_size, 1, width] (or without the 1).
        block_table: int32 or int64 [b, max_pages], the pages of each request in order. b may be 0.
        cu_seqlens: int32 or int64 [b + 1]: request i goes to rows cu_seqlens[i] to cu_seqlens[i + 1]. Or [b]: the last
            request then extends to the end of the result.
        cache_format: None infers it from the cache.
        scale: for format ``fp8``: a number, or a one-element float32 tensor on the cache's device; default 1.
        seq_starts: int32 or int64 [b], the first token of each request; 0 if None.
        seq_ends: int32 or int64 [b], the end position of each request; rows of later tokens are not written.
        total_tokens: rows of the result. If None and ``out`` is None, cu_seqlens[b] is read from the device,
            which synchronizes.
        dtype: dtype of the result, if ``out`` is None.
        out: [rows, head_dim], bf16, fp16 or float32, with last stride 1. Rows from cu_seqlens[b] on are not written.
        backend: "portable" or "reference"; None selects one.

    Returns:
        [total_tokens, head_dim] in ``dtype``, or ``out``. Tokens whose page is not in the table or not in the cache are
        returned as zeros.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    cache, layout = as_cache(cache, cache_format)
    device = cache.device
    gather_slots.check(block_table, cu_seqlens, seq_starts, device)
    if seq_ends is not None:
        shape = (block_table.shape[0],)
        checks.indices("seq_ends", seq_ends, shape, device)
    scale_tensor, scale_value = scales.split("scale", one_scale(layout, scale), device)
    if out is None:
        check_float_dtype(dtype)
        if total_tokens is None:
            if cu_seqlens.shape[0] == block_table.shape[0]:
                raise ValueError(
                    f"cu_seqlens must have shape [{block_table.shape[0] + 1}] if total_tokens and out are None, "
                    f"got {list(cu_seqlens.shape)}"
                )
            total_tokens = int(cu_seqlens[-1])
            if torch.compiler.is_compiling():
                # The number is symbolic and cannot be formatted. PyTorch 2.11 accepts no message here.
                torch._check(total_tokens >= 0)
            elif total_tokens < 0:
                raise ValueError(f"cu_seqlens must end at 0 or above, got {total_tokens}")
        else:
            checks.positive_int("total_tokens", total_tokens, or_zero=True)
        out = torch.zeros(total_tokens, layout.head_dim, dtype=dtype, device=device)
    else:
        checks.output("out", out, ("rows", layout.head_dim), checks.FLOAT_DTYPES, device, may_be_empty=1)
        checks.no_overlap("out", out, cache=cache)
        if total_tokens is not None and total_tokens != out.shape[0]:
            raise ValueError(f"total_tokens must be out's {out.shape[0]} rows or None, got {total_tokens}")
    call = dispatch.CallSpec(OPERATION, device, out.dtype, layout.name, cache.shape[1], layout.head_dim)
    backend = dispatch.select(call, backend)
    gather_slots.check_values(cache, block_table, cu_seqlens, seq_starts, out.shape[0], seq_ends)
    params = CacheGatherParams(
        cache=cache,
        block_table=block_table,
        cu_seqlens=cu_seqlens,
        seq_starts=seq_starts,
        seq_ends=seq_ends,
        cache_format=layout.name,
        head_dim=layout.head_dim,
        scale_tensor=scale_tensor,
        scale_value=scale_value,
        out=out,
    )
    _cache_gather(params, backend)
    return out


def gather_last(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    gather_lens: torch.Tensor | None = None,
    offset: int = 0,
    cache_format: str | CacheFormat | None = None,
    scale: float | torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Gather the last tokens of each request to its part of a workspace, beginning at row ``offset``.

    Args:
        cache, block_table, cache_format, scale, backend: as for ``gather``.
        seq_lens: int32 or int64 [b], tokens of each request.
        out: [b, rows, head_dim], bf16, fp16 or float32, with last stride 1 and no gap between requests. Other rows are
            not written; tokens beyond the last row are dropped.
        gather_lens: int32 or int64 [b], the number of tokens of each request; all if None.
        offset: 0 to ``rows``.

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    checks.indices("seq_lens", seq_lens, ("b",))
    requests, device = seq_lens.shape[0], seq_lens.device
    checks.tensor("block_table", block_table, (requests, "max_pages"), checks.INDEX_DTYPES, device)
    checks.output("out", out, (requests, "rows", "head_dim"), checks.FLOAT_DTYPES, device)
    rows = out.shape[1]
    if requests > 1 and rows > 1 and out.stride(0) != rows * out.stride(1):
        raise ValueError(f"out must have no gap between requests, got strides {out.stride()}")
    if checks.positive_int("offset", offset, or_zero=True) > rows:
        raise ValueError(f"offset must be at most out's {rows} rows, got {offset}")
    if checks.is_strided(cache) and cache.dim() > 1:
        value_checks.lengths("seq_lens", seq_lens, block_table.shape[1] * cache.shape[1])
    lengths = seq_lens.long()
    starts = torch.zeros_like(lengths)
    if gather_lens is not None:
        checks.indices("gather_lens", gather_lens, (requests,), device)
        starts = (lengths - gather_lens.clamp_min(0)).clamp_min(0)
    cache_gather(
        cache,
        block_table,
        torch.arange(requests, device=device) * rows + offset,
        cache_format=cache_format,
        scale=scale,
        seq_starts=starts,
        seq_ends=torch.minimum(lengths, starts + rows - offset),
        out=out.view(requests * rows, out.shape[2]),
        backend=backend,
    )
    return out


@register_op(OPERATION, mutates=("out",))
def _cache_gather(params: CacheGatherParams, backend: str) -> None:
    # Not checked by the caller: in a compiled program the number of rows may be unknown.
    if params.out.shape[0] and params.block_table.shape[0]:
        _gather_rows(params, backend)


@dispatch.implemented(OPERATION, portable=_refuses_portable)
def _gather_rows(params: CacheGatherParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.cache_gather.portable import cache_gather
    else:
        from flashlatte.ops.cache_gather.reference import cache_gather

    cache_gather(params)
