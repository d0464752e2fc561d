"""``flash_mla_with_kvcache``: dense and sparse decode."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashlatte.flash_mla import positions, schedule
from flashlatte.flash_mla.schedule import FlashMLASchedMeta
from flashlatte.kv_cache import scales
from flashlatte.kv_cache.registry import FLASH_MLA_FORMATS, FLASH_MLA_REARRANGED, formats_of_width
from flashlatte.ops.dense_decode import dense_decode
from flashlatte.ops.sparse_decode import sparse_decode
from flashlatte.runtime import checks
from flashlatte.runtime.block_tables import whole_rows
from flashlatte.runtime.repeat import repeats_launches

# The last positional arguments in the order of FlashMLA and sgl-flash-mla, and in that of vLLM's copy.
LAST = ("enable_batch_invariant", "use_legacy", "kv_format", "descale_q", "descale_k")
LAST_IN_VLLM = ("out", "enable_batch_invariant")


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    *last: Any,
    enable_batch_invariant: bool = False,
    use_legacy: bool | None = None,
    kv_format: str | None = None,
    descale_q: float | torch.Tensor | None = None,
    descale_k: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    precision: str | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode over a paged latent cache: dense, or over selected tokens if ``indices`` is given.

    Args:
        q: [b, s_q, h_q, d], bf16 or fp16 (float32 on the reference); dense also float8_e4m3fn; d 576 or 512.
        k_cache: dense: [pages, page_size, h_kv, d] in q's dtype, or float8_e4m3fn with ``is_fp8_kvcache``; sparse:
            [pages, page_size, 1, width] one-byte with ``is_fp8_kvcache``, ``width`` that of ``kv_format``, or
            [pages, page_size, 1, d] in q's dtype without.
        block_table: dense: int32 or int64 [b, max_pages]. A slice of a wider buffer's columns stands for the buffer's
            whole rows, as in FlashMLA. Unused in sparse decode, where indices are cache positions.
        cache_seqlens: dense: int32 or int64 [b], clamped to 0 and to the keys of a whole row of block_table. Unused in
            sparse decode.
        head_dim_v: width of a value (512).
        tile_scheduler_metadata, num_splits: the results of ``get_mla_metadata`` or ``get_mla_decoding_metadata``;
            they hold nothing, and any call may reuse them.
        softmax_scale: above 0; d^-0.5 if None.
        causal: dense only; bottom-right: query token j attends to keys 0 to cache_seqlens - s_q + j.
        is_fp8_kvcache: whether k_cache has one-byte values; must match its dtype, except for caches of DeepSeek-V4.1
            and with ``descale_k``. Default: from the dtype.
        indices: sparse: int32 or int64 [b, s_q, topk], page · page_size + offset; values outside the cache (in
            FlashMLA only -1) select nothing.
        attn_sink: sparse: float32 [h_q]; out is scaled by e^lse / (e^lse + e^sink), lse is not.
        extra_k_cache, extra_indices_in_kvcache: sparse: a second cache in the same format, or in "V41_FP4" (288 wide)
            next to "V41", and its indices.
        topk_length, extra_topk_length: sparse: int32 or int64 [b] or [b, s_q], number of indices to use.
        last: by position: ``enable_batch_invariant, use_legacy, kv_format, descale_q, descale_k``, the order of
            sgl-flash-mla, if the first is a bool; else ``out, enable_batch_invariant``, the order of vLLM's copy.
        enable_batch_invariant: make a request's result bitwise independent of the other requests of the batch.
        use_legacy: selects between sgl-flash-mla's kernels. False: an ambiguous width means "V41" with the values and
            scales of a token adjacent, as its current kernels read it. True: "V41" is an error, because its legacy
            kernels read pages whose scales follow all values.
        kv_format: sparse: format of a one-byte k_cache: "V32" (656 bytes a token), "V32_NO_ROPE" (528), "V4" (584),
            "V41" (528) or "V41_FP4" (288). Default: inferred from the width, which must not be ambiguous (528).
        descale_q: dense with a float8_e4m3fn q: query = byte · descale_q, rounded to bf16; a number or a one-element
            float32 tensor; default 1.
        descale_k: dense over a float8_e4m3fn cache: key = byte · descale_k; as ``descale_q``.
        out: optional output buffer [b, s_q, h_q, head_dim_v] in q's dtype.
        lse: optional output buffer, float32 [b, h_q, s_q].
        precision: dense over a float8_e4m3fn cache: "fp8" multiplies in e4m3, as FlashMLA does (``dense_decode``); the
            values of a float8_e4m3fn q are not rounded again. None: exact products of bf16 queries.
        backend: "hopper", "portable" or "reference"; None selects one.

    Returns:
        out [b, s_q, h_q, head_dim_v] in q's dtype (bf16 for a float8_e4m3fn q), and lse, natural logarithm, float32
        [b, h_q, s_q] with strides (s_q · h_q, 1, h_q). A row without keys: out 0, lse +inf.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device; inconsistent arguments.
    """
    if last:
        named = positions.by_name("flash_mla_with_kvcache", last, LAST, LAST_IN_VLLM)
        enable_batch_invariant = named.get("enable_batch_invariant", enable_batch_invariant)
        use_legacy = named.get("use_legacy", use_legacy)
        kv_format = named.get("kv_format", kv_format)
        descale_q = named.get("descale_q", descale_q)
        descale_k = named.get("descale_k", descale_k)
        out = named.get("out", out)
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta) or num_splits is not None:
        schedule.check(tile_scheduler_metadata, num_splits)
    if indices is None:
        if not (attn_sink is extra_k_cache is extra_indices_in_kvcache is None) or not (
            topk_length is extra_topk_length is kv_format is None
        ):
            _refuse_given(
                "belongs to sparse decode and needs indices",
                attn_sink=attn_sink,
                extra_k_cache=extra_k_cache,
                extra_indices_in_kvcache=extra_indices_in_kvcache,
                topk_length=topk_length,
                extra_topk_length=extra_topk_length,
                kv_format=kv_format,
            )
        if block_table is None or cache_seqlens is None:
            missing = "block_table" if block_table is None else "cache_seqlens"
            raise ValueError(f"{missing} must be given for dense decode (without indices), got None")
        return _dense(
            q,
            k_cache,
            whole_rows(block_table),
            cache_seqlens,
            head_dim_v,
            softmax_scale,
            causal,
            is_fp8_kvcache,
            enable_batch_invariant,
            descale_q,
            descale_k,
            out,
            lse,
            precision,
            backend,
        )
    if causal is not False and checks.flag("causal", causal):
        raise ValueError("causal must be False in sparse decode (with indices), whose mask is the indices; got True")
    if not (descale_q is descale_k is precision is None):
        _refuse_given(
            "belongs to dense decode over an fp8 cache and must be None with indices",
            descale_q=descale_q,
            descale_k=descale_k,
            precision=precision,
        )
    return _sparse(
        q,
        k_cache,
        indices,
        topk_length,
        attn_sink,
        extra_k_cache,
        extra_indices_in_kvcache,
        extra_topk_length,
        softmax_scale,
        head_dim_v,
        is_fp8_kvcache,
        enable_batch_invariant,
        kv_format,
        use_legacy,
        out,
        lse,
        backend,
    )


@repeats_launches
def _dense(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float | None,
    causal: bool,
    is_fp8_kvcache: bool | None,
    batch_invariant: bool,
    descale_q: float | torch.Tensor | None,
    descale_k: float | torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    precision: str | None,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``dense_decode`` with FlashMLA's arguments. A repeated launch skips these checks."""
    _check_fp8_flag(k_cache, is_fp8_kvcache, descale_k)
    factor = None
    if precision is not None and _is_e4m3(q) and _is_e4m3(k_cache):
        q, descale_k, factor = _without_scale(q, descale_q, descale_k)
    else:
        q = _query(q, descale_q)
    with checks.naming(k_scale="descale_k", batch_invariant="enable_batch_invariant"):
        out, lse = dense_decode(
            q,
            k_cache,
            block_table,
            cache_seqlens,
            head_dim_v=head_dim_v,
            softmax_scale=softmax_scale,
            causal=causal,
            k_scale=descale_k,
            out=out,
            lse=lse,
            empty_lse=math.inf,
            batch_invariant=batch_invariant,
            precision=precision,
            backend=backend,
        )
    if factor is not None:
        out.div_(factor)
    return out, lse


@repeats_launches
def _sparse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    softmax_scale: float | None,
    head_dim_v: int,
    is_fp8_kvcache: bool | None,
    batch_invariant: bool,
    kv_format: str | None,
    use_legacy: bool | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sparse_decode`` with FlashMLA's arguments. A repeated launch skips these checks."""
    cache_format = _cache_format(k_cache, kv_format, use_legacy)
    _check_fp8_flag(k_cache, is_fp8_kvcache, None)
    with checks.naming(extra_indices="extra_indices_in_kvcache", batch_invariant="enable_batch_invariant"):
        return sparse_decode(
            q,
            k_cache,
            indices,
            cache_format=cache_format,
            topk_length=topk_length,
            attn_sink=attn_sink,
            extra_k_cache=extra_k_cache,
            extra_indices=extra_indices,
            extra_topk_length=extra_topk_length,
            softmax_scale=softmax_scale,
            head_dim_v=head_dim_v,
            out=out,
            lse=lse,
            empty_lse=math.inf,
            batch_invariant=batch_invariant,
            backend=backend,
        )


def _refuse_given(reason: str, **arguments: object) -> None:
    """Raise an error about the first argument that is not None."""
    name = next(name for name, value in arguments.items() if value is not None)
    raise ValueError(f"{name} {reason}, got {_kind(arguments[name])}")


def _query(q: torch.Tensor, descale_q: float | torch.Tensor | None) -> torch.Tensor:
    """q unchanged, or a float8_e4m3fn q dequantized to bf16."""
    if not _is_e4m3(q):
        if descale_q is not None:
            raise ValueError(f"descale_q belongs to a float8_e4m3fn q, got {_kind(q)}")
        return q
    tensor, number = scales.split("descale_q", descale_q, q.device)
    return (q.float() * (number if tensor is None else tensor)).to(torch.bfloat16)


def _without_scale(
    q: torch.Tensor, descale_q: float | torch.Tensor | None, descale_k: float | torch.Tensor | None
) -> tuple[torch.Tensor, float | torch.Tensor | None, float | torch.Tensor | None]:
    """A float8_e4m3fn q in bf16 without its scale, the scale of keys for these queries, and the outputs' factor.

    ``dense_decode`` rounds queries to e4m3 with powers of two. This keeps q's values, but not values · ``descale_q``.
    Logits are products of both scales. With both in the scale of keys, outputs are ``descale_q`` times too large.
    """
    if descale_q is None:
        return q.to(torch.bfloat16), descale_k, None
    q_tensor, q_number = scales.split("descale_q", descale_q, q.device)
    k_tensor, k_number = scales.split("descale_k", descale_k, q.device)
    factor = q_number if q_tensor is None else q_tensor
    return q.to(torch.bfloat16), factor * (k_number if k_tensor is None else k_tensor), factor


def _is_e4m3(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn


def _kind(value: object) -> str:
    return checks.dtype_names([value.dtype]) if isinstance(value, torch.Tensor) else type(value).__name__


def _cache_format(k_cache: object, kv_format: object, use_legacy: object) -> str | None:
    """The cache's format in ``kv_cache``; None if dtype and width determine it."""
    if use_legacy is not None:
        checks.flag("use_legacy", use_legacy)
    if kv_format is not None:
        checks.choice("kv_format", kv_format, tuple(FLASH_MLA_FORMATS))
        if use_legacy and kv_format in FLASH_MLA_REARRANGED:
            raise ValueError(
                f"kv_format must not be {kv_format!r} with use_legacy=True: the legacy kernels of sgl-flash-mla read "
                "pages whose scales follow all values, and those are not supported"
            )
        return FLASH_MLA_FORMATS[str(kv_format)]
    fitting = formats_of_width(k_cache) if checks.is_strided(k_cache) and k_cache.dim() else []
    if len(fitting) < 2:
        return None
    if use_legacy is False:
        return FLASH_MLA_FORMATS["V41"]
    names = {layout.name for layout in fitting}
    accepted = checks.join_or(repr(name) for name, layout in FLASH_MLA_FORMATS.items() if layout in names)
    raise ValueError(
        f"k_cache is {fitting[0].record_width} bytes wide, which is ambiguous: kv_format must be given, {accepted} "
        "(use_legacy=False means 'V41')"
    )


def _check_fp8_flag(k_cache: object, is_fp8_kvcache: bool | None, descale_k: object) -> None:
    if is_fp8_kvcache is None:
        return
    if not isinstance(is_fp8_kvcache, bool):
        raise TypeError(f"is_fp8_kvcache must be True or False, got {is_fp8_kvcache!r}")
    if not isinstance(k_cache, torch.Tensor):
        return
    one_byte = k_cache.dtype.itemsize == 1
    if checks.given("k_cache", k_cache).dim() and any(
        layout.block_scaling is not None for layout in formats_of_width(k_cache)
    ):
        # FlashMLA's release that introduced caches of DeepSeek-V4.1 had no is_fp8_kvcache.
        return
    if one_byte != is_fp8_kvcache and not (one_byte and descale_k is not None):
        raise ValueError(
            f"is_fp8_kvcache must say whether k_cache has one-byte values: got {is_fp8_kvcache} with k_cache "
            f"{_kind(k_cache)}"
        )
