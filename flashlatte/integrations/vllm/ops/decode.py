"""vLLM's Triton decode attention: one query token for each request, over pages of keys and values or of latents."""

from __future__ import annotations

import torch

from flashlatte.integrations.vllm.ops.dtypes import as_e4m3, one_byte_scale
from flashlatte.integrations.vllm.ops.first_rows import first_rows
from flashlatte.ops.dense_decode import dense_decode
from flashlatte.ops.paged_attention import paged_attention
from flashlatte.runtime import checks


def decode_attention_fwd(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    req_to_token: torch.Tensor,
    b_seq_len: torch.Tensor,
    attn_logits: torch.Tensor | None,
    num_kv_splits: int | None,
    sm_scale: float,
    page_size: int = 1,
    logit_cap: float = 0.0,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    is_mla: bool = False,
) -> None:
    """``dense_decode`` (with ``is_mla``) or ``paged_attention`` with vLLM's arguments.

    Args:
        q: [b, h_q, d], bf16, fp16, or float32 (reference only).
        k_buffer: [pages, page_size, h_kv, d], or [pages · page_size, h_kv, d]; q's dtype, float8_e4m3fn, or uint8 with
            e4m3 values.
        v_buffer: the same with d_v. With ``is_mla`` a value is the first d_v elements of a key, and only the shape of
            v_buffer is used.
        o: [b, h_q, d_v] in q's dtype, written.
        lse: [b, h_q] in bf16, fp16 or float32, written: the natural-log log-sum-exp. A request without keys has o 0 and
            lse -inf (NaN in vLLM).
        req_to_token: int32 or int64 [b or more, max_pages] (or [b or more, max_pages, 1]), the pages of each request.
        b_seq_len: int32 or int64 [b], keys of each request.
        attn_logits, num_kv_splits: unused.
        sm_scale: above 0.
        page_size: tokens in a page.
        logit_cap: above 0 and at most 2^125, or 0 for none; 0 with ``is_mla``.
        k_scale, v_scale: scales of a one-byte cache: a number, or a float32 tensor with one element. With ``is_mla``
            k_scale also applies to values.
        is_mla: whether values are parts of the keys.

    Raises:
        TypeError, ValueError: as ``dense_decode`` and ``paged_attention``; buffers that differ in pages or page size.
    """
    checks.tensor("q", q, ("b", "h_q", "d"), checks.FLOAT_DTYPES, may_be_empty=1)
    batch, h_q, _ = q.shape
    page_size = checks.positive_int("page_size", page_size)
    softmax_scale = checks.score_factor("sm_scale", sm_scale)
    keys, values = (_as_pages(*given, page_size) for given in (("k_buffer", k_buffer), ("v_buffer", v_buffer)))
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"v_buffer must have k_buffer's pages, page size and heads {list(keys.shape[:3])}, "
            f"got {list(values.shape[:3])}"
        )
    if checks.flag("is_mla", is_mla) and logit_cap:
        raise ValueError(f"logit_cap must be 0 with is_mla, got {logit_cap}")
    checks.output("o", o, (batch, h_q, values.shape[3]), (q.dtype,), q.device)
    checks.output("lse", lse, (batch, h_q), checks.FLOAT_DTYPES, q.device, unit_last_stride=False)
    table = first_rows("req_to_token", req_to_token, "q", batch)
    if table.dim() == 3 and table.shape[2] == 1:
        table = table.squeeze(2)
    names = {"k_cache": "k_buffer", "v_cache": "v_buffer", "block_table": "req_to_token", "softmax_scale": "sm_scale"}
    k_scale, v_scale = one_byte_scale(keys, k_scale), one_byte_scale(values, v_scale)
    with checks.naming(cache_seqlens="b_seq_len", seqused_k="b_seq_len", softcap="logit_cap", **names):
        if is_mla:
            result = dense_decode(
                q.unsqueeze(1),
                keys,
                table,
                b_seq_len,
                head_dim_v=values.shape[3],
                softmax_scale=softmax_scale,
                k_scale=k_scale,
                out=o.unsqueeze(1),
            )[1].squeeze(2)
        else:
            result = paged_attention(
                q,
                keys,
                values,
                table,
                b_seq_len,
                torch.arange(batch + 1, dtype=torch.int32, device=q.device),
                softmax_scale=softmax_scale,
                softcap=logit_cap,
                k_scale=k_scale,
                v_scale=v_scale,
                out=o,
            )[1]
    lse.copy_(result)


def _as_pages(name: str, buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """The buffer as [pages, page_size, h_kv, width]."""
    buffer = as_e4m3(checks.given(name, buffer))
    if buffer.dim() == 3 and buffer.shape[0] % page_size == 0:
        return buffer.unflatten(0, (-1, page_size))
    if buffer.dim() != 4 or buffer.shape[1] != page_size:
        raise ValueError(
            f"{name} must have shape [pages, {page_size}, h_kv, width] or [pages · {page_size}, h_kv, width], "
            f"got {list(buffer.shape)}"
        )
    return buffer
