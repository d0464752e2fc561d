"""FlashMLA's functions for multi-head attention over requests of variable length, exported by
``flashlatte.flash_mla``."""

from __future__ import annotations

import torch

from flashlatte.ops.dense_prefill import dense_prefill
from flashlatte.runtime import checks


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Variable-length multi-head attention, forward and backward: ``flashlatte.dense_prefill``.

    In addition to FlashMLA's function it supports any head dims, fp16, grouped heads in the backward pass, a gradient
    of lse, and ``deterministic``.

    Args:
        q: [T_q, h, d_qk], bf16 or fp16 (float32 and float64 on the reference).
        k, v: [T_k, h_k, d_qk] and [T_k, h_k, d_v] in q's dtype. h is a multiple of h_k.
        cu_seqlens_qo, cu_seqlens_kv: int32 or int64 [b + 1], boundaries of the requests.
        max_seqlen_qo, max_seqlen_kv: length of the longest request; they never change results.
        dropout_p: 0, as there is no dropout.
        softmax_scale: above 0; d_qk^-0.5 if None.
        causal: bottom-right: the last query of a request attends to all of its keys.
        deterministic: make dq, dk and dv bitwise reproducible.
        is_varlen: if False, all requests have T_q / b queries and T_k / b keys, and the values of cu_seqlens are
            ignored.
        backend: "hopper", "portable" or "reference"; None selects one.

    Returns:
        out [T_q, h, d_v] in q's dtype, and lse (natural logarithm), float32 [T_q, h] with strides (1, T_q). A row
        without visible keys has out 0 and lse -inf.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments; a backend
            that cannot run the call.
    """
    if checks.number("dropout_p", dropout_p) != 0:
        raise ValueError(f"dropout_p must be 0, as there is no dropout, got {dropout_p}")
    if not checks.flag("is_varlen", is_varlen):
        cu_seqlens_qo = _equal_lengths("q", q, "cu_seqlens_qo", cu_seqlens_qo)
        cu_seqlens_kv = _equal_lengths("k", k, "cu_seqlens_kv", cu_seqlens_kv)
    with checks.naming(
        cu_seqlens_q="cu_seqlens_qo",
        cu_seqlens_k="cu_seqlens_kv",
        max_seqlen_q="max_seqlen_qo",
        max_seqlen_k="max_seqlen_kv",
    ):
        return dense_prefill(
            q,
            k,
            v,
            cu_seqlens_qo,
            cu_seqlens_kv,
            max_seqlen_qo,
            max_seqlen_kv,
            softmax_scale=softmax_scale,
            causal=causal,
            deterministic=deterministic,
            backend=backend,
        )


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``flash_attn_varlen_func`` of q, k and v in one tensor.

    Args:
        qkv: [T, h, 2 · head_dim_qk + d_v], q, k and v along the last axis.
        cu_seqlens, max_seqlen: boundaries and maximum length, for both queries and keys.
        head_dim_qk: width of a query and of a key.
        dropout_p, softmax_scale, causal, deterministic, is_varlen, backend: as for ``flash_attn_varlen_func``.

    Returns:
        out and lse, as ``flash_attn_varlen_func``.

    Raises:
        TypeError, ValueError: as ``flash_attn_varlen_func``; qkv is too narrow for these head dims.
    """
    _check_packed("qkv", qkv, 2 * checks.positive_int("head_dim_qk", head_dim_qk), "2 · head_dim_qk")
    q, k, v = qkv.split((head_dim_qk, head_dim_qk, qkv.shape[-1] - 2 * head_dim_qk), dim=-1)
    names = {"cu_seqlens_qo": "cu_seqlens", "cu_seqlens_kv": "cu_seqlens", "q": "qkv", "k": "qkv", "v": "qkv"}
    with checks.naming(**names, max_seqlen_qo="max_seqlen", max_seqlen_kv="max_seqlen"):
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            dropout_p,
            softmax_scale,
            causal,
            deterministic,
            is_varlen,
            backend=backend,
        )


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``flash_attn_varlen_func`` of k and v in one tensor.

    Args:
        q: [T_q, h, head_dim_qk].
        kv: [T_k, h_k, head_dim_qk + d_v], k and v along the last axis.
        cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv: as for ``flash_attn_varlen_func``.
        head_dim_qk: width of a query and of a key.
        dropout_p, softmax_scale, causal, deterministic, is_varlen, backend: as for ``flash_attn_varlen_func``.

    Returns:
        out and lse, as ``flash_attn_varlen_func``.

    Raises:
        TypeError, ValueError: as ``flash_attn_varlen_func``; kv is too narrow for these head dims.
    """
    _check_packed("kv", kv, checks.positive_int("head_dim_qk", head_dim_qk), "head_dim_qk")
    k, v = kv.split((head_dim_qk, kv.shape[-1] - head_dim_qk), dim=-1)
    with checks.naming(k="kv", v="kv"):
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_qo,
            cu_seqlens_kv,
            max_seqlen_qo,
            max_seqlen_kv,
            dropout_p,
            softmax_scale,
            causal,
            deterministic,
            is_varlen,
            backend=backend,
        )


def _check_packed(name: str, value: object, least: int, keys: str) -> None:
    value = checks.given(name, value)
    if value.dim() != 3 or value.shape[2] <= least:
        raise ValueError(
            f"{name} must have shape [tokens, heads, {keys} + d_v], more than {least} wide, got {list(value.shape)}"
        )


def _equal_lengths(name: str, rows: torch.Tensor, cu_name: str, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """cu_seqlens of requests with equal numbers of rows."""
    for tensor_name, tensor in ((name, rows), (cu_name, cu_seqlens)):
        if checks.given(tensor_name, tensor).dim() == 0:
            raise TypeError(f"{tensor_name} must be a tensor with an axis, got a scalar")
    batch, total = cu_seqlens.shape[0] - 1, rows.shape[0]
    if batch < 1 or total % batch:
        raise ValueError(f"{name} must have equally many tokens for each of {batch} requests, got {total} tokens")
    return torch.arange(batch + 1, dtype=torch.int32, device=rows.device) * (total // batch)
