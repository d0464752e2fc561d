"""``sparse_attention``: its arguments, their checks, the choice of implementations, and its gradient.

The forward pass runs the kernels of ``sparse_prefill``; this operation adds the backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from flashlatte.ops.sparse_attention.reference import (
    SparseAttentionBackwardParams,
    SparseAttentionGradients,
    SparseAttentionParams,
)
from flashlatte.ops.sparse_prefill import api as forward_api
from flashlatte.ops.sparse_prefill.reference import SparsePrefillParams
from flashlatte.runtime import checks, dispatch, refusals
from flashlatte.runtime.gradients import refuse_transforms
from flashlatte.runtime.torch_op import records_gradient, register_differentiable_op

OPERATION = "sparse_attention"
BACKWARD = "sparse_attention_backward"
# Gradients of a tile of keys are accumulated in registers.
_PORTABLE_MAX_HEAD_DIM = 576
# A program sums over all heads of a token.
_HOPPER_MAX_HEADS = 128


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    return refusals.triton_attention(call, _PORTABLE_MAX_HEAD_DIM)


def _refuses_hopper(call: dispatch.CallSpec) -> str | None:
    return (
        refusals.dtype(call, torch.bfloat16, torch.float16)
        or refusals.hopper(call)
        or refusals.head_dims(call, (576, 512), (512, 512))
        or refusals.unaligned(call)
        or (None if (call.h_q or 0) <= _HOPPER_MAX_HEADS else f"takes up to {_HOPPER_MAX_HEADS} heads, not {call.h_q}")
    )


def sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    d_v: int = 512,
    deterministic: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of many query tokens, each over selected tokens of a contiguous latent; differentiable.

    ``sparse_prefill`` with gradients: a key is a row of ``kv``, a value its first ``d_v`` elements. Gradients flow from
    out and lse to q, kv and attn_sink; indices and lengths have none, and there is no second derivative. The backward
    pass recomputes the probabilities from lse (arXiv:2307.08691, §2.3.2).

    Args:
        q: [s_q, h_q, d], bf16, fp16, or float32 and float64 (reference only); s_q may be 0. d is 576 or 512 in MLA.
        kv: [s_kv, 1, d] in q's dtype.
        indices: int32 or int64 [s_q, 1, topk], topk ≥ 1. A value outside 0 to s_kv - 1 selects nothing; a token
            selected twice counts twice, also in its gradient.
        topk_length: int32 or int64 [s_q]: the number of indices that count, from the first; all if None.
        attn_sink: float32 (float64 for float64) [h_q]: out is scaled by e^lse / (e^lse + e^sink). lse does not include
            it.
        softmax_scale: above 0; d^-0.5 if None.
        d_v: width of a value, at most d.
        deterministic: make dkv bitwise reproducible. By default float32 atomics sum it. (out, lse, dq and the gradient
            of attn_sink are always reproducible.) Deterministic sums take up to 256 MiB of scratch ("hopper": 320
            MiB), two launches for each such piece of contributions (4 · s_q · topk · d bytes in total), and a sort for
            each four million indices, which takes about 40 bytes per index.
        backend: "hopper", "portable" or "reference", for both passes; None selects one for each; a named backend that
            cannot run the call is an error. The backward pass of "hopper" supports up to 128 heads, and takes up to
            256 MiB more of scratch.

    Returns:
        out [s_q, h_q, d_v] in q's dtype, and lse (natural logarithm) over the selected keys, float32 (float64 for
        float64) [s_q, h_q]. A query that selects nothing has out 0 and lse -inf, and contributes no gradient.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device; inconsistent arguments; a
            backend that cannot run the call.
    """
    forward_api.check_operands(q, kv, indices, topk_length, attn_sink, d_v, (*checks.FLOAT_DTYPES, torch.float64))
    h_q, head_dim = q.shape[1:]
    scale = checks.softmax_scale(softmax_scale, head_dim)
    deterministic = checks.flag("deterministic", deterministic)
    differentiable = [x for x in (q, kv, attn_sink) if x is not None]
    refuse_transforms(OPERATION, *differentiable)

    def choose(operation: str) -> str:
        call = dispatch.CallSpec(
            operation,
            q.device,
            q.dtype,
            head_dim=head_dim,
            head_dim_v=d_v,
            h_q=h_q,
            h_kv=1,
            rows_aligned=checks.rows_aligned(q) and checks.rows_aligned(kv),
        )
        return dispatch.select(call, backend)

    forward_backend = choose(forward_api.OPERATION)
    backward_backend = choose(BACKWARD) if records_gradient(*differentiable) else ""
    return _sparse_attention(
        q, kv, indices, topk_length, attn_sink, scale, d_v, deterministic, forward_backend, backward_backend
    )


def _wide(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _fake_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    params = SparseAttentionParams(*args[: len(SparseAttentionParams._fields)])
    q, rows = params.q, params.q.shape[:2]
    return q.new_empty(*rows, params.d_v), q.new_empty(rows, dtype=_wide(q))


def _fake_backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, kv: torch.Tensor, *_: object
) -> SparseAttentionGradients:
    return SparseAttentionGradients(
        q.new_empty(q.shape), kv.new_empty(kv.shape), q.new_empty(q.shape[1], dtype=_wide(q))
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, kv, indices, topk_length, attn_sink, *numbers = inputs
    ctx.scale, _, ctx.deterministic, _, ctx.backend = numbers
    ctx.save_for_backward(q, kv, indices, topk_length, attn_sink, *output)


def _gradient(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * 10
    q, kv, indices, topk_length, attn_sink, out, lse = ctx.saved_tensors
    params = SparseAttentionBackwardParams(
        dout=torch.zeros_like(out) if dout is None else dout.contiguous(),
        dlse=None if dlse is None else dlse.contiguous(),
        q=q,
        kv=kv,
        indices=indices,
        topk_length=topk_length,
        attn_sink=attn_sink,
        out=out,
        lse=lse,
        softmax_scale=ctx.scale,
        deterministic=ctx.deterministic,
    )
    dq, dkv, d_sink = _sparse_attention_backward(*params, ctx.backend)
    return dq, dkv, None, None, None if attn_sink is None else d_sink, *[None] * 5


def _no_second_derivative(*_: object) -> None:
    raise RuntimeError("sparse_attention has no second derivative: its gradient cannot be differentiated again")


@register_differentiable_op(
    BACKWARD, fake=_fake_backward, backward=_no_second_derivative, record=SparseAttentionBackwardParams
)
def _sparse_attention_backward(
    params: SparseAttentionBackwardParams, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gradients = _fake_backward(*params)
    if params.q.shape[0]:
        _run_backward(params, gradients, backend)
    else:
        gradients.dkv.zero_()
        gradients.d_sink.zero_()
    return gradients


@dispatch.implemented(BACKWARD, hopper=_refuses_hopper, portable=_refuses_portable)
def _run_backward(params: SparseAttentionBackwardParams, gradients: SparseAttentionGradients, backend: str) -> None:
    if backend == "hopper":
        from flashlatte.ops.sparse_attention.hopper.launch import backward
    elif backend == "portable":
        from flashlatte.ops.sparse_attention.portable.launch import backward
    else:
        from flashlatte.ops.sparse_attention.reference import backward

    backward(params, gradients)


@register_differentiable_op(
    OPERATION, fake=_fake_forward, backward=_gradient, setup_context=_keep, record=SparseAttentionParams
)
def _sparse_attention(
    params: SparseAttentionParams, backend: str, backward_backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _fake_forward(*params)
    if params.q.shape[0]:
        given = SparsePrefillParams(
            q=params.q,
            kv=params.kv,
            indices=params.indices,
            topk_length=params.topk_length,
            attn_sink=params.attn_sink,
            softmax_scale=params.softmax_scale,
            empty_lse=-math.inf,
            out=out,
            max_logits=torch.empty_like(lse),
            lse=lse,
        )
        dispatch.implementation(forward_api.OPERATION, backend)(given)
    return out, lse
