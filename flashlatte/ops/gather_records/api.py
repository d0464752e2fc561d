"""``gather_records``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.kv_cache import gather_slots
from flashlatte.kv_cache.codec import as_cache
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.ops.gather_records.reference import GatherRecordsParams
from flashlatte.runtime import checks, dispatch, refusals
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "gather_records"


@repeats_launches
def gather_records(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    total_tokens: int,
    *,
    cache_format: str | CacheFormat | None = None,
    seq_starts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Gather the token records of several requests from a paged cache of any format, without conversion.

    The records can be sent to other ranks, or dequantized by ``kv_cache.dequantize``. A record is the concatenation of
    a token's planes (for ``model1``, its data and scales).

    Args:
        cache: [pages, page_size, 1, width] (or without the 1).
        block_table: int32 or int64 [b, max_pages], the pages of each request in order. b may be 0.
        cu_seqlens: int32 or int64 [b + 1]: request i goes to rows cu_seqlens[i] to cu_seqlens[i + 1]. Or [b]: the last
            request then extends to the end of the result.
        total_tokens: rows of the result.
        cache_format: None infers it from the cache.
        seq_starts: int32 or int64 [b], the first token of each request; 0 if None.
        out: [total_tokens, width] in the cache's dtype with last stride 1, to write to. Rows from cu_seqlens[b] on are
            not written.
        backend: "portable" or "reference"; None selects one.

    Returns:
        [total_tokens, width] in the cache's dtype, or ``out``. Tokens whose page is not in the table or not in the
        cache are returned as zero bytes.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    cache, layout = as_cache(cache, cache_format)
    gather_slots.check(block_table, cu_seqlens, seq_starts, cache.device)
    shape = (checks.positive_int("total_tokens", total_tokens, or_zero=True), layout.record_width)
    out = checks.output_or_new("out", out, shape, cache.dtype, cache.device, zeros=True, cache=cache)
    call = dispatch.CallSpec(OPERATION, cache.device, cache.dtype, layout.name, cache.shape[1], layout.head_dim)
    backend = dispatch.select(call, backend)
    gather_slots.check_values(cache, block_table, cu_seqlens, seq_starts, total_tokens)
    if total_tokens and block_table.shape[0]:
        params = GatherRecordsParams(
            cache=cache,
            block_table=block_table,
            cu_seqlens=cu_seqlens,
            seq_starts=seq_starts,
            cache_format=layout.name,
            head_dim=layout.head_dim,
            out=out,
        )
        _gather_records(params, backend)
    return out


@register_op(OPERATION, mutates=("out",))
@dispatch.implemented(OPERATION, portable=refusals.triton)
def _gather_records(params: GatherRecordsParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.gather_records.portable import gather_records
    else:
        from flashlatte.ops.gather_records.reference import gather_records

    gather_records(params)
