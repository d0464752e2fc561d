"""``turboquant_decode``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import math

import torch

from flashlatte.kv_cache.turboquant import as_turboquant_cache
from flashlatte.ops.turboquant_decode.reference import TurboQuantDecodeParams
from flashlatte.runtime import checks, decode_outputs, dispatch, gradients, refusals, value_checks
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "turboquant_decode"
# A program holds the whole rotation matrix.
_PORTABLE_MAX_HEAD_DIM = 128
# The kernel reads 32-bit words relative to the cache's address; a record may begin inside a word.
_WORD_BYTES, _RECORD_ALIGNMENT = 4, 2


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    return refusals.triton_attention(call, _PORTABLE_MAX_HEAD_DIM) or _unaligned(call)


def _unaligned(call: dispatch.CallSpec) -> str | None:
    if call.rows_aligned:
        return None
    return "takes caches that begin at multiples of 4 bytes, with records at multiples of 2"


@repeats_launches
def turboquant_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    cache_format: str | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    empty_lse: float = -math.inf,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a few query tokens per request over all tokens of its TurboQuant cache.

    out = softmax(q · Kᵀ · softmax_scale) · V, where K and V are the dequantized keys and values, as
    ``turboquant_gather`` returns them. Query head h reads key head h // (h_q / h_kv). Queries are rotated instead of
    undoing the rotation of keys. To include other keys, such as new tokens that are not in the cache, use
    ``merge_states``.

    Args:
        q: [b, s_q, h_q, d], bf16, fp16, or float32 (reference only). b and s_q may be 0.
        cache: uint8 [pages, page_size, h_kv, record_bytes], last stride 1, as written by ``turboquant_store``; h_kv
            divides h_q.
        block_table: int32 or int64 [b, max_pages], the pages of each request in order. Entries beyond a request's
            length are not read.
        cache_seqlens: int32 or int64 [b], keys of each request; clamped to 0 and to the capacity of block_table. Keys
            whose page is not in the cache are masked.
        cache_format: one of ``kv_cache.turboquant.TURBOQUANT_NAMES``; None infers it from the width of a record.
        softmax_scale: above 0; d^-0.5 if None.
        causal: query token j attends to keys 0 to n - s_q + j, where n is the clamped cache_seqlens (bottom-right
            alignment).
        out: [b, s_q, h_q, d] in q's dtype to write to; last stride 1. It must not share memory with an input.
        lse: float32 [b, h_q, s_q] to write to, any strides.
        empty_lse: lse of a query that has no visible key, inf or -inf; its out is 0.
        backend: "portable" or "reference"; None selects one; a named backend that cannot run the call is an error.

    Returns:
        out [b, s_q, h_q, d] in q's dtype, and lse (natural logarithm), float32 [b, h_q, s_q]. A newly allocated lse has
        strides (s_q · h_q, 1, h_q).

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device; inconsistent arguments; a
            backend that cannot run the call.
    """
    checks.tensor("q", q, ("b", "s_q", "h_q", "d"), checks.FLOAT_DTYPES, may_be_empty=2)
    batch, s_q, h_q, head_dim = q.shape
    device = q.device
    layout = as_turboquant_cache(cache, cache_format, head_dim)
    checks.tensor("cache", cache, ("pages", "page_size", "h_kv", layout.record_bytes), (torch.uint8,), device)
    h_kv = cache.shape[2]
    if h_q % h_kv:
        raise ValueError(f"cache must have a number of heads that divides q's {h_q}, got {h_kv}")
    checks.block_table(block_table, batch, device)
    checks.indices("cache_seqlens", cache_seqlens, (batch,), device)
    value_checks.pages(block_table, cache_seqlens, *cache.shape[:2])
    scale = checks.softmax_scale(softmax_scale, head_dim)
    checks.flag("causal", causal)
    out, lse = decode_outputs.prepare(q, head_dim, out, lse, cache=cache)
    call = dispatch.CallSpec(
        OPERATION,
        device,
        q.dtype,
        layout.name,
        cache.shape[1],
        head_dim,
        head_dim,
        h_q,
        h_kv,
        rows_aligned=_is_aligned(cache),
    )
    gradients.warn_if_dropped(OPERATION, q)
    empty_lse = checks.empty_lse(empty_lse)
    backend = dispatch.select(call, backend)
    if batch and s_q:
        params = TurboQuantDecodeParams(
            q=q,
            cache=cache,
            block_table=block_table,
            cache_seqlens=cache_seqlens,
            cache_format=layout.name,
            softmax_scale=scale,
            causal=causal,
            empty_lse=empty_lse,
            out=out,
            lse=lse,
        )
        _turboquant_decode(params, backend)
    return out, lse


def _is_aligned(cache: torch.Tensor) -> bool:
    return checks.begins_at_multiple(cache, _WORD_BYTES) and checks.rows_aligned(cache, _RECORD_ALIGNMENT)


@register_op(OPERATION, mutates=("out", "lse"))
@dispatch.implemented(OPERATION, portable=_refuses_portable)
def _turboquant_decode(params: TurboQuantDecodeParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.turboquant_decode.portable.launch import turboquant_decode
    else:
        from flashlatte.ops.turboquant_decode.reference import turboquant_decode

    turboquant_decode(params)
