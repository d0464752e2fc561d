"""``trtllm_batch_decode_with_kv_cache_mla`` and ``xqa_batch_decode_with_kv_cache_mla``: MLA over a block table, or over
selected tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashlatte.flashinfer import page_tables
from flashlatte.flashinfer.attend import attend
from flashlatte.flashinfer.conventions import LOG2_E, own_backend, refuse
from flashlatte.runtime import checks

BACKENDS = ("auto", "xqa", "trtllm-gen", "cute-dsl", "sparse")
Q_DTYPES = (*checks.FLOAT_DTYPES, torch.float8_e4m3fn)


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: Sequence[torch.Tensor] | torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    sparse_mla_top_k_lens: torch.Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """MLA decode: ``flashlatte.dense_decode``, or ``flashlatte.sparse_decode`` over selected tokens.

    Without ``sparse_mla_top_k`` the mask is causal: query j of q_len attends to keys 0 to seq_len - q_len + j.

    Args:
        query: [b, q_len, heads, d], or [T, heads, d] with ``cum_seq_lens_q``; bf16, fp16, float32 (reference only), or
            float8_e4m3fn, which is converted to bf16. d is kv_lora_rank + qk_rope_head_dim.
        kv_cache: [pages, page_size, d] or [pages, 1, page_size, d] in query's dtype or float8_e4m3fn; with
            ``sparse_mla_top_k`` in bf16, fp16 or float32, or uint8 with d 656: DeepSeek-V3.2's cache.
        workspace_buffer, qk_nope_head_dim, max_seq_len, skip_softmax_threshold_scale_factor, enable_pdl, is_var_seq,
            cute_dsl_impl, kv_scale_format, max_q_len, multi_ctas_kv_counter_buffer: unused. No key is skipped.
        kv_lora_rank, qk_rope_head_dim: widths of a value, and of the rest of a key.
        block_tables: int32 or int64 [b, max_pages]; with ``sparse_mla_top_k`` [b, q_len, sparse_mla_top_k], or [T,
            sparse_mla_top_k] with ``cum_seq_lens_q``: page · page_size + offset. Others select
            nothing.
        seq_lens: int32 or int64 [b], keys of each request. With ``sparse_mla_top_k``, a query reads its first indices,
            as many as it has keys by the causal mask. With a cache of 656 bytes a token: the number of indices of each
            query, [b, q_len] or [b · q_len]; all if None, or if [b] with q_len above 1.
        sparse_mla_top_k: indices of a query; 0 for dense decode.
        out: [b, q_len, heads, kv_lora_rank] or [T, heads, kv_lora_rank] to write to, in query's dtype (bf16 for
            float8_e4m3fn).
        bmm1_scale: a number, the softmax scale times the scales of query and keys.
        bmm2_scale: a number above 0 by which values are multiplied.
        sinks: with ``sparse_mla_top_k``: float32 [heads], or a list of one: e^sink is added to the softmax's sum.
        backend: one of FlashInfer's, of which any means FlashLatte's choice; or "hopper", "portable" or "reference".
        uses_shared_paged_kv_idx: must be True: values are columns of keys.
        lse: float32 [b · q_len, heads] or [b, q_len, heads] to write to; [T, heads] with ``cum_seq_lens_q``.
        return_lse: also return lse.
        cum_seq_lens_q: int32 or int64 [b + 1], the requests' boundaries in query, from 0. No value is read on the host.
        sparse_mla_top_k_lens: with ``sparse_mla_top_k``: int32 or int64 [T], how many of its first indices each query
            reads. ``seq_lens`` is then unused.
        enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global, use_fp16_softmax: must be False, 1, 0, None, and None
            or False (``flashlatte.distributed`` has context parallelism).
        return_lse_base: "base2", or "basee" for the natural logarithm; None: "base2".

    Returns:
        out, or (out, lse) with lse as given or [b · q_len, heads], including ``sinks``. A query
        without keys has out 0 and lse -inf (or its sink).

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device; inconsistent arguments;
            what no operation computes.
    """
    own = own_backend(backend, BACKENDS)
    wants_lse = checks.flag("return_lse", return_lse) or lse is not None
    if return_lse_base is not None:
        checks.choice("return_lse_base", return_lse_base, ("base2", "basee"))
    elif backend == "cute-dsl" and wants_lse:
        raise ValueError("backend must not be 'cute-dsl' for an lse without return_lse_base, as its default is another")
    refuse(
        "no operation computes it",
        enable_dcp=enable_dcp,
        cp_world=None if cp_world == 1 else cp_world,
        cp_rank=cp_rank or None,
        causal_seqlens_kv_global=causal_seqlens_kv_global,
        use_fp16_softmax=use_fp16_softmax,
    )
    if not checks.flag("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx):
        raise ValueError("uses_shared_paged_kv_idx must be True, as values are columns of keys; got False")
    if cum_seq_lens_q is None:
        checks.tensor("query", query, ("b", "q_len", "heads", "d"), Q_DTYPES, may_be_empty=1)
    else:
        checks.tensor("query", query, ("T", "heads", "d"), Q_DTYPES, may_be_empty=1)
        checks.indices("cum_seq_lens_q", cum_seq_lens_q, ("b + 1",), query.device)
        if cum_seq_lens_q.shape[0] < 2:
            raise ValueError("cum_seq_lens_q must have shape [b + 1] with b at least 1, got [1]")
    kv_lora_rank = checks.positive_int("kv_lora_rank", kv_lora_rank)
    qk_rope_head_dim = checks.positive_int("qk_rope_head_dim", qk_rope_head_dim, or_zero=True)
    if query.shape[-1] != kv_lora_rank + qk_rope_head_dim:
        raise ValueError(
            f"query must have kv_lora_rank + qk_rope_head_dim = {kv_lora_rank + qk_rope_head_dim} columns, "
            f"got {query.shape[-1]}"
        )
    # float8_e4m3fn to bf16 is exact.
    q = query.to(torch.bfloat16) if query.dtype == torch.float8_e4m3fn else query
    out = checks.output_or_new("out", out, (*query.shape[:-1], kv_lora_rank), q.dtype, q.device)
    if wants_lse:
        flat = query.shape[:-1] if cum_seq_lens_q is not None else (query.shape[0] * query.shape[1], query.shape[2])
        nested = checks.is_strided(lse) and lse.shape == query.shape[:-1]
        shape = query.shape[:-1] if nested else flat
        lse = checks.output_or_new("lse", lse, shape, torch.float32, q.device, unit_last_stride=False)
    out_rows, lse_rows = out, lse
    if cum_seq_lens_q is None:
        # [tokens, heads, …]
        q, out_rows = q.flatten(0, 1), _token_rows("out", out)
        lse_rows = lse if lse is None or lse.dim() == 2 else _token_rows("lse", lse)
    cache = _cache(kv_cache)
    scale, factor = _number("bmm1_scale", bmm1_scale), _number("bmm2_scale", bmm2_scale)
    selects = checks.positive_int("sparse_mla_top_k", sparse_mla_top_k, or_zero=True) > 0
    sink = _sink(sinks)
    if selects:
        shape = (*query.shape[:-2], sparse_mla_top_k)
        checks.tensor("block_tables", block_tables, shape, checks.INDEX_DTYPES, q.device, may_be_empty=1)
        table, queries = block_tables.reshape(-1, sparse_mla_top_k), 1
        if sparse_mla_top_k_lens is None:
            lengths = _selected_lengths(seq_lens, cum_seq_lens_q, query, cache.dtype == torch.uint8)
        else:
            tokens = (table.shape[0],)
            lengths = checks.indices("sparse_mla_top_k_lens", sparse_mla_top_k_lens, tokens, q.device, may_be_empty=1)
    else:
        refuse("dense_decode has no sinks", sinks=sink)
        refuse("dense_decode reads all keys", sparse_mla_top_k_lens=sparse_mla_top_k_lens)
        table, lengths, queries = _requests(block_tables, seq_lens, cum_seq_lens_q, query)
    is_fp8 = cache.dtype == torch.float8_e4m3fn
    names = {"k_cache": "kv_cache", "block_table": "block_tables", "cache_seqlens": "seq_lens", "attn_sink": "sinks"}
    with checks.naming(softmax_scale="bmm1_scale", **names):
        attend(
            q,
            cache,
            table,
            lengths,
            queries,
            # Keys are multiplied by k_scale too.
            softmax_scale=scale / factor if is_fp8 else scale,
            out=out_rows,
            lse=lse_rows,
            backend=own,
            causal=queries > 1,
            k_scale=factor if is_fp8 else None,
            selects=selects,
            attn_sink=sink,
        )
    if factor != 1 and not is_fp8:
        out.mul_(factor)
    if lse is None:
        return out
    if sink is not None:
        torch.logaddexp(lse, sink.detach(), out=lse)
    if return_lse_base != "basee":
        lse.mul_(LOG2_E)
    return (out, lse) if return_lse else out


def xqa_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: Sequence[torch.Tensor] | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """``trtllm_batch_decode_with_kv_cache_mla`` of one query token per request, without lse.

    Args:
        query: [b, 1, heads, d].
        out: [b, heads, kv_lora_rank] or [b, 1, heads, kv_lora_rank] to write to.
        kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
            max_seq_len, bmm1_scale, bmm2_scale, enable_pdl: as there.
        sinks: must be None.

    Returns:
        ``out``; a new one is [b, 1, heads, kv_lora_rank].

    Raises:
        TypeError, ValueError: as there; more than one query token.
    """
    checks.tensor("query", query, ("b", 1, "heads", "d"), Q_DTYPES, may_be_empty=1)
    result = trtllm_batch_decode_with_kv_cache_mla(
        query,
        kv_cache,
        workspace_buffer,
        qk_nope_head_dim,
        kv_lora_rank,
        qk_rope_head_dim,
        block_tables,
        seq_lens,
        max_seq_len,
        out=out.unsqueeze(1) if checks.is_strided(out) and out.dim() == 3 else out,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=sinks,
    )
    assert isinstance(result, torch.Tensor)
    return result if out is None else out


def _cache(kv_cache: torch.Tensor) -> torch.Tensor:
    """The cache [pages, page_size, 1, d]."""
    shape = checks.given("kv_cache", kv_cache).shape
    checks.dtype("kv_cache", kv_cache.dtype, (*Q_DTYPES, torch.uint8))
    if len(shape) == 3:
        return kv_cache.unsqueeze(2)
    if len(shape) == 4 and shape[1] == 1:
        return kv_cache.transpose(1, 2)
    raise ValueError(f"kv_cache must have shape [pages, page_size, d] or [pages, 1, page_size, d], got {list(shape)}")


def _token_rows(name: str, x: torch.Tensor) -> torch.Tensor:
    """An output [b, q_len, …] as [b · q_len, …] in the same memory."""
    if min(x.shape[:2]) > 1 and x.stride(0) != x.shape[1] * x.stride(1):
        raise ValueError(f"{name} must have equally spaced query tokens, got strides {x.stride()}")
    return x.flatten(0, 1)


def _number(name: str, value: float | torch.Tensor) -> float:
    if isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a number, which is passed to kernels by value, got a tensor")
    return checks.float32_factor(name, value)


def _sink(sinks: Sequence[torch.Tensor] | torch.Tensor | None) -> torch.Tensor | None:
    if sinks is None or isinstance(sinks, torch.Tensor):
        return sinks
    if not isinstance(sinks, (list, tuple)):
        raise TypeError(f"sinks must be a tensor or a list of one, got {type(sinks).__name__}")
    if len(sinks) != 1:
        raise ValueError(f"sinks must be a tensor or a list of one, got {len(sinks)}")
    return checks.given("sinks", sinks[0])


def _requests(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor | None,
    cum_seq_lens_q: torch.Tensor | None,
    query: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Tables and lengths of rows for ``attend``, and the query tokens of each."""
    requests = query.shape[0] if cum_seq_lens_q is None else cum_seq_lens_q.shape[0] - 1
    checks.indices("block_tables", block_tables, (requests, "max_pages"), query.device, may_be_empty=1)
    lengths = checks.indices("seq_lens", seq_lens, (requests,), query.device, may_be_empty=1)
    if cum_seq_lens_q is None:
        return block_tables, lengths, query.shape[1]
    request, lengths = page_tables.token_rows(cum_seq_lens_q, lengths, query.shape[0])
    return block_tables.index_select(0, request), lengths, 1


def _selected_lengths(
    seq_lens: torch.Tensor | None, cum_seq_lens_q: torch.Tensor | None, query: torch.Tensor, is_packed: bool
) -> torch.Tensor | None:
    """The number of indices that each query token reads; None for all.

    In a packed cache, ``seq_lens`` are these numbers; else the keys of each request.
    """
    if is_packed and cum_seq_lens_q is not None:
        raise ValueError("cum_seq_lens_q must be None for a cache of 656 bytes a token, got a tensor")
    if cum_seq_lens_q is not None:
        lengths = checks.indices("seq_lens", seq_lens, (cum_seq_lens_q.shape[0] - 1,), query.device)
        return page_tables.token_rows(cum_seq_lens_q, lengths, query.shape[0])[1]
    requests, queries = query.shape[:2]
    if is_packed:
        ignored = seq_lens is None or (seq_lens.shape == (requests,) and queries > 1)
        return None if ignored else checks.given("seq_lens", seq_lens).reshape(-1)
    lengths = checks.indices("seq_lens", seq_lens, (requests,), query.device, may_be_empty=1)
    if queries == 1:
        return lengths
    boundaries = torch.arange(0, requests * queries + 1, queries, dtype=lengths.dtype, device=lengths.device)
    return page_tables.token_rows(boundaries, lengths, requests * queries)[1]
