"""``sparse_prefill``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flashlatte.ops.sparse_prefill.reference import SparsePrefillParams
from flashlatte.runtime import checks, dispatch, gradients, query_parts, refusals, value_checks
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "sparse_prefill"
# A whole row is one tile in shared memory.
_PORTABLE_MAX_HEAD_DIM = 1024
# Accepted values of ``precision``.
_PRECISIONS = (None, "fp8")


def _refuses_hopper(call: dispatch.CallSpec) -> str | None:
    return (
        refusals.dtype(call, torch.bfloat16, torch.float16)
        or refusals.hopper(call)
        or refusals.head_dims(call, (576, 512), (512, 512))
        or refusals.unaligned(call)
    )


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    if call.optional_features:
        return f"has no {call.optional_features}: it multiplies in q's dtype"
    return refusals.triton_attention(call, _PORTABLE_MAX_HEAD_DIM)


@repeats_launches
def sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float | None = None,
    *,
    q_rope: torch.Tensor | None = None,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    empty_lse: float = -math.inf,
    precision: str | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of many query tokens, each over selected tokens of a contiguous latent.

    A key is a row of ``kv``, a value its first ``d_v`` elements. All strides but the last are free. It has no backward
    pass, and warns once if gradients are enabled and an input requires one. ``sparse_attention`` has gradients.

    Args:
        q: [s_q, h_q, d], bf16, fp16, or float32 (reference only); s_q may be 0. d is 576 or 512 in MLA. Or the
            first columns of the queries, if the others are in ``q_rope``.
        kv: [s_kv, 1, d] in q's dtype.
        indices: int32 or int64 [s_q, 1, topk], topk ≥ 1. A value outside 0 to s_kv - 1 selects nothing; a token
            selected twice counts twice.
        softmax_scale: above 0; d^-0.5 if None.
        q_rope: the last columns of the queries, [s_q, h_q, d - width of q], in q's dtype, last stride 1; None: ``q``
            has all d. The result is that of ``torch.cat((q, q_rope), -1)``. "hopper" reads 512 and 64 columns in place
            if rows begin at multiples of 16 bytes, "portable" as many columns of q as a value has. Other widths, and
            those of ``precision="fp8"``, are copied together first.
        d_v: width of a value, at most d.
        attn_sink: float32 [h_q]: out is scaled by e^lse / (e^lse + e^sink). lse does not include it.
        topk_length: int32 or int64 [s_q]: the number of indices that count, from the first; all if None.
        out: [s_q, h_q, d_v] in q's dtype to write to; last stride 1. It must not share memory with an input.
        empty_lse: lse of a query that selects nothing, inf or -inf; its out is 0 and its max_logits -inf.
        precision: None multiplies in q's dtype. "fp8" multiplies in e4m3: kv is rounded to e4m3 with one scale, each
            row of q with its own scale, and the probabilities are rounded too. The scale of kv is determined by the
            largest finite value in any row, selected or not: a very large value makes all others imprecise. The error
            is about 20 times that of None if the weights of a query are similar, and 35 times if few keys dominate.
            Hopper's e4m3 sums have 14 bits: if the values have a common sign, the error is 1 to 3% with 2,048 indices
            (docs/guide/numerics.md). Only "hopper" and "reference" implement it; on a GPU, the
            reference runs only if ``backend`` names it.
        backend: "hopper", "portable" or "reference"; None selects one; a named backend that cannot run the call is an
            error.

    Returns:
        out [s_q, h_q, d_v] in q's dtype; max_logits, the largest q · k · softmax_scale, and lse, natural
        logarithm, both float32 [s_q, h_q], contiguous.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device; inconsistent arguments; a
            backend that cannot run the call.
    """
    head_dim = check_operands(q, kv, indices, topk_length, attn_sink, d_v, checks.FLOAT_DTYPES, q_rope)
    s_q, h_q, _ = q.shape
    device = q.device
    if precision not in _PRECISIONS:
        raise ValueError(f"precision must be None or 'fp8', got {precision!r}")
    scale = checks.softmax_scale(softmax_scale, head_dim)
    if out is None:
        out = q.new_empty(s_q, h_q, d_v)
    else:
        checks.output("out", out, (s_q, h_q, d_v), (q.dtype,), device)
        checks.no_overlap("out", out, q=q, q_rope=q_rope, kv=kv)
    max_logits = torch.empty(s_q, h_q, dtype=torch.float32, device=device)
    lse = torch.empty_like(max_logits)

    call = dispatch.CallSpec(
        OPERATION,
        device,
        q.dtype,
        head_dim=head_dim,
        head_dim_v=d_v,
        h_q=h_q,
        h_kv=1,
        # Parts of queries that are not aligned are joined.
        rows_aligned=all(checks.rows_aligned(rows) for rows in ((q, kv, out) if q_rope is None else (kv, out))),
        optional_features=None if precision is None else f"precision={precision!r}",
    )
    gradients.warn_if_dropped(OPERATION, q, q_rope, kv, attn_sink)
    empty_lse = checks.empty_lse(empty_lse)
    select = dispatch.select if precision is None else dispatch.select_kernel
    backend = select(call, backend)
    if s_q == 0:
        return out, max_logits, lse
    params = SparsePrefillParams(
        q=q,
        kv=kv,
        indices=indices,
        topk_length=topk_length,
        attn_sink=attn_sink,
        softmax_scale=scale,
        empty_lse=empty_lse,
        out=out,
        max_logits=max_logits,
        lse=lse,
        precision=precision,
        q_rope=q_rope,
    )
    _sparse_prefill(params, backend)
    return out, max_logits, lse


@register_op(OPERATION, mutates=("out", "max_logits", "lse"))
@dispatch.implemented(OPERATION, hopper=_refuses_hopper, portable=_refuses_portable)
def _sparse_prefill(params: SparsePrefillParams, backend: str) -> None:
    if backend == "hopper":
        from flashlatte.ops.sparse_prefill.hopper.launch import sparse_prefill
    elif backend == "portable":
        from flashlatte.ops.sparse_prefill.by_token import sparse_prefill
    else:
        from flashlatte.ops.sparse_prefill.reference import sparse_prefill

    sparse_prefill(params)


def check_operands(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    d_v: int,
    dtypes: Sequence[torch.dtype],
    q_rope: torch.Tensor | None = None,
) -> int:
    """Check the operands, and return the width of the queries; shared with ``sparse_attention``.

    ``dtypes``: accepted dtypes of q.
    """
    checks.tensor("q", q, ("s_q", "h_q", "d"), dtypes, may_be_empty=1)
    s_q, h_q, _ = q.shape
    head_dim = checks.query_width(q, q_rope)
    device = q.device
    may_be_empty = 0 if s_q else 3
    checks.same_dtype("kv", kv, q)
    if q_rope is not None and checks.is_strided(kv) and kv.dim() == 3 and kv.shape[2] != head_dim:
        raise ValueError(f"kv must have rows of q's and q_rope's {head_dim} elements, got {kv.shape[2]}")
    checks.tensor("kv", kv, ("s_kv", 1, head_dim), (q.dtype,), device, may_be_empty=may_be_empty)
    checks.tensor("indices", indices, (s_q, 1, "topk"), checks.INDEX_DTYPES, device, may_be_empty=may_be_empty)
    if attn_sink is not None:
        wide = torch.promote_types(q.dtype, torch.float32)
        checks.tensor("attn_sink", attn_sink, (h_q,), (wide,), device, unit_last_stride=False)
    if topk_length is not None:
        checks.tensor("topk_length", topk_length, (s_q,), checks.INDEX_DTYPES, device, unit_last_stride=False)
        value_checks.selections("indices", indices, "topk_length", topk_length, kv.shape[0])
    else:
        value_checks.entries("indices", indices, kv.shape[0])
    if checks.positive_int("d_v", d_v) > head_dim:
        raise ValueError(f"d_v must be at most {query_parts.last_dimension(q, q_rope)}, got {d_v}")
    return head_dim
