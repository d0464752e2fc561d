"""vLLM's operations on latent caches (write, gather), and concatenation of queries."""

from __future__ import annotations

import math

import torch

from flashlatte.integrations.vllm.ops.dtypes import DS_MLA, DS_MLA_FORMAT, cache_scale, latent_format
from flashlatte.integrations.vllm.ops.first_rows import first_rows, request_rows
from flashlatte.kv_cache.formats import ROPE_DIM
from flashlatte.kv_cache.plain import Fp8Format
from flashlatte.ops.cache_gather import cache_gather
from flashlatte.ops.cache_write import cache_write
from flashlatte.ops.concat_mla_q import concat_mla_q as concat_queries
from flashlatte.ops.gather_records import gather_records
from flashlatte.ops.rope_cache_write import rope_cache_write
from flashlatte.runtime import checks


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    skip_scale: bool = False,
    *,
    scale_rounding: str = "power_of_two",
) -> None:
    """Write the latents of new tokens into a paged cache: ``kv_cache.write``.

    Args:
        kv_c: [T, kv_lora_rank], bf16, fp16 or float32; T ≥ n, and tokens from n on are padding.
        k_pe: [T, rope] in the same dtype, rotated. rope may be 0, for models without rotated keys; "fp8_ds_mla" then
            stores zeros there, as vLLM 0.33 does.
        kv_cache: [pages, page_size, width], written.
        slot_mapping: int32 or int64 [n], page · page_size + offset; a slot outside the cache skips its token.
        kv_cache_dtype: "auto" or the float dtype of ``kv_cache``; "fp8" or "fp8_e4m3"; "fp8_ds_mla".
        scale: float32 with one element, for "fp8". Unused otherwise.
        skip_scale: use scale 1 instead of ``scale``.
        scale_rounding: for "fp8_ds_mla": "power_of_two", as vLLM from 0.32 on, or "exact", as vLLM to 0.26.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    checks.flag("skip_scale", skip_scale)
    checks.choice("scale_rounding", scale_rounding, ("power_of_two", "exact"))
    without_rope = checks.is_strided(k_pe) and k_pe.dim() == 2 and k_pe.shape[1] == 0
    if without_rope:
        has_zeros = kv_cache_dtype == DS_MLA and checks.is_strided(kv_c)
        rope = kv_c.new_zeros(k_pe.shape[0], ROPE_DIM) if has_zeros else None
    else:
        rope = k_pe
    with checks.naming(x="kv_c", rope="k_pe", cache="kv_cache"):
        cache_write(
            kv_cache,
            slot_mapping,
            kv_c,
            rope=rope,
            cache_format=latent_format(kv_cache_dtype, kv_cache, "kv_cache"),
            scale=cache_scale(kv_cache_dtype, 1.0 if skip_scale else scale),
            scale_rounding=scale_rounding if kv_cache_dtype == DS_MLA else "power_of_two",
        )


def concat_and_cache_mla_rope_fused(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_cache_dtype: str,
    kv_cache_scale: torch.Tensor,
) -> None:
    """Rotate the rope parts of queries and keys in place, and write the keys: ``kv_cache.rope_write``.

    The rotation is computed in float32 and rounded once; vLLM computes in the dtype of the tensors.

    Args:
        positions: int32 or int64 [T], the row of cos_sin_cache for each token.
        q_pe: [T, h, rope], written.
        k_pe: [T, rope], written.
        kv_c: [T, kv_lora_rank], all of the same dtype.
        cos_sin_cache: [positions, rope], any float dtype, cosines and then sines.
        is_neox: whether a frequency rotates dims i and i + rope / 2; if False, dims 2i and 2i + 1.
        slot_mapping, kv_cache, kv_cache_dtype, kv_cache_scale: as ``concat_and_cache_mla``. Tokens without
            a valid slot are rotated too.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    checks.flag("is_neox", is_neox)
    names = {"latent": "kv_c", "k_rope": "k_pe", "q_rope": "q_pe", "cos_sin": "cos_sin_cache", "cache": "kv_cache"}
    with checks.naming(scale="kv_cache_scale", **names):
        rope_cache_write(
            kv_cache,
            slot_mapping,
            kv_c,
            k_pe,
            positions,
            cos_sin_cache,
            interleaved=not is_neox,
            q_rope=q_pe,
            cache_format=latent_format(kv_cache_dtype, kv_cache, "kv_cache"),
            scale=cache_scale(kv_cache_dtype, kv_cache_scale),
        )


def gather_and_maybe_dequant_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    num_tokens: int | torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """Gather and dequantize the latents of several requests: ``kv_cache.gather``.

    Args:
        src_cache: [pages, page_size, width].
        dst: [T, kv_lora_rank + rope], bf16, fp16 or float32; its first rows are written.
        block_table: int32 or int64 [b or more, max_pages].
        cu_seq_lens: int32 or int64 [b + 1]: request i goes to rows cu_seq_lens[i] to cu_seq_lens[i + 1].
        token_to_seq: unused: ``cu_seq_lens`` has the same information.
        num_tokens: maximum number of rows to write; a one-element integer tensor is read to the host, as in vLLM.
        kv_cache_dtype, scale: as ``concat_and_cache_mla``.
        seq_starts: int32 or int64 [b or more], the token of each request to begin with; 0 if None.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    table = request_rows(block_table, cu_seq_lens)
    requests = table.shape[0]
    with checks.naming(cache="src_cache", out="dst", cu_seqlens="cu_seq_lens"):
        cache_gather(
            src_cache,
            table,
            cu_seq_lens,
            cache_format=latent_format(kv_cache_dtype, src_cache, "src_cache"),
            scale=cache_scale(kv_cache_dtype, scale),
            seq_starts=None if seq_starts is None else first_rows("seq_starts", seq_starts, "cu_seq_lens", requests),
            out=first_rows("dst", dst, "num_tokens", num_tokens),
        )


def cp_gather_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    batch_size: int,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """Gather the tokens of several requests without conversion, in any format: ``kv_cache.gather_records``.

    Args:
        src_cache: [pages, page_size, …], 32- or 16-bit floats or any one-byte dtype; the values of a token are
            contiguous.
        dst: [T, …] in the same dtype, written; rows from cu_seq_lens[batch_size] on stay unchanged.
        block_table: int32 or int64 [b, max_pages], b ≥ batch_size.
        cu_seq_lens: int32 or int64 [batch_size + 1].
        batch_size: requests to gather.
        seq_starts: int32 or int64 [batch_size], the token of each request to begin with; 0 if None.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    rows, target = _rows("src_cache", src_cache, 2), _rows("dst", dst, 1)
    if dst.dtype != src_cache.dtype:
        raise TypeError(
            f"dst must be {checks.dtype_names([src_cache.dtype])} like src_cache, got {checks.dtype_names([dst.dtype])}"
        )
    one_byte = rows.dtype.itemsize == 1
    with checks.naming(cache="src_cache", out="dst", cu_seqlens="cu_seq_lens"):
        gather_records(
            rows.view(torch.uint8) if one_byte else rows,
            first_rows("block_table", block_table, "batch_size", batch_size),
            first_rows("cu_seq_lens", cu_seq_lens, "batch_size + 1", batch_size + 1),
            target.shape[0],
            # The e4m3 format copies bytes of any width.
            cache_format=Fp8Format.name if one_byte else None,
            seq_starts=None if seq_starts is None else first_rows("seq_starts", seq_starts, "batch_size", batch_size),
            out=target.view(torch.uint8) if one_byte else target,
        )


def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    workspace_starts: torch.Tensor,
    batch_size: int,
    seq_starts: torch.Tensor | None = None,
    host_cache: torch.Tensor | None = None,
    host_row_ids: torch.Tensor | None = None,
    device_row_ids: torch.Tensor | None = None,
) -> None:
    """Gather the tokens of several requests from an ``fp8_ds_mla`` cache as bf16 rows: ``kv_cache.gather``.

    Args:
        src_cache: [pages, page_size, 656], any one-byte dtype.
        dst: bf16 [T, 576], written.
        block_table: int32 or int64 [b, max_pages], b ≥ batch_size.
        workspace_starts: int32 or int64 [b], the first row of each request; the last request extends to the end.
        batch_size: requests to gather.
        seq_starts: int32 or int64 [batch_size], the token of each request to begin with; 0 if None.
        host_cache, host_row_ids, device_row_ids: must be None: rows in host memory are not supported.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    for name, value in (("host_cache", host_cache), ("host_row_ids", host_row_ids), ("device_row_ids", device_row_ids)):
        if value is not None:
            raise ValueError(f"{name} must be None: rows on the host are not supported")
    if isinstance(src_cache, torch.Tensor) and src_cache.dtype == torch.float8_e5m2:
        src_cache = src_cache.view(torch.uint8)
    with checks.naming(cache="src_cache", out="dst", cu_seqlens="workspace_starts"):
        cache_gather(
            src_cache,
            first_rows("block_table", block_table, "batch_size", batch_size),
            first_rows("workspace_starts", workspace_starts, "batch_size", batch_size),
            cache_format=DS_MLA_FORMAT,
            seq_starts=None if seq_starts is None else first_rows("seq_starts", seq_starts, "batch_size", batch_size),
            out=dst,
        )


def concat_mla_q(ql_nope: torch.Tensor, q_pe: torch.Tensor, q_out: torch.Tensor) -> None:
    """Concatenate the two parts of queries into ``q_out`` [T, H, latent + rope]: ``flashlatte.concat_mla_q``.

    ``q_out`` may have more heads, as padding: only the first H are written.
    """
    three = checks.given("q_out", q_out).dim() == checks.given("ql_nope", ql_nope).dim() == 3
    heads = q_out[:, : ql_nope.shape[1]] if three else q_out
    with checks.naming(out="q_out"):
        concat_queries(ql_nope, q_pe, out=heads)


def _rows(name: str, x: torch.Tensor, axes: int) -> torch.Tensor:
    """A view of ``x`` with all axes after the first ``axes`` flattened into one."""
    x = checks.given(name, x)
    if x.dim() <= axes:
        raise ValueError(f"{name} must have more than {axes} axes, got shape {list(x.shape)}")
    try:
        return x.view(*x.shape[:axes], math.prod(x.shape[axes:]))
    except RuntimeError:
        raise ValueError(f"{name} must have the values of a token contiguous, got strides {x.stride()}") from None
