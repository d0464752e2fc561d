"""``dense_prefill``: arguments, checks, choice of the implementation, and gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from flashlatte.ops.dense_prefill.reference import DensePrefillGradients, DensePrefillParams
from flashlatte.runtime import checks, dispatch, ragged, refusals
from flashlatte.runtime.gradients import refuse_transforms
from flashlatte.runtime.torch_op import records_gradient, register_differentiable_op, register_op

OPERATION = "dense_prefill"
BACKWARD = "dense_prefill_backward"
# The first fields of DensePrefillParams.
_NUM_TENSORS = 5
# A whole row is one tile in shared memory.
_PORTABLE_MAX_HEAD_DIM = 256
# From the width of a swizzled line to the capacity of registers and shared memory.
_HOPPER_HEAD_DIMS = range(64, 256 + 1, 8)


def _refuses_hopper(call: dispatch.CallSpec) -> str | None:
    return (
        refusals.dtype(call, torch.bfloat16, torch.float16)
        or refusals.hopper(call)
        or refusals.head_dim_in(call, _HOPPER_HEAD_DIMS)
        or refusals.unaligned(call)
    )


def _refuses_hopper_backward(call: dispatch.CallSpec) -> str | None:
    return refusals.head_dims(call, (192, 128), (128, 128)) or _refuses_hopper(call)


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    return refusals.triton_attention(call, _PORTABLE_MAX_HEAD_DIM)


def dense_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: int | Sequence[int] | None = None,
    deterministic: bool = False,
    out: torch.Tensor | None = None,
    empty_lse: float = -math.inf,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiable multi-head attention of packed requests of variable length.

    Request i has queries cu_seqlens_q[i] to cu_seqlens_q[i+1] - 1, and keys likewise. Query j of a request with s_q
    queries and s_k keys has position p = j + s_k - s_q, so the last query is aligned with the last key. All strides but
    the last are free: q, k and v may be views of one packed tensor. Query head i reads key head i // (h / h_k).
    Gradients flow from out and lse to q, k and v; there is no second derivative.

    Args:
        q: [T_q, h, d_qk], bf16, fp16, or float32 and float64 (reference only).
        k: [T_k, h_k, d_qk] in q's dtype; h is a multiple of h_k.
        v: [T_k, h_k, d_v] in q's dtype.
        cu_seqlens_q: int32 or int64 [b + 1], non-decreasing boundaries of the requests. Tokens outside the boundaries
            belong to no request: their out is 0, their lse is ``empty_lse``, and their gradients are 0. Boundaries are
            clamped to T_q. b, T_q and T_k may be 0.
        cu_seqlens_k: the same for k and v. A request may have no query or no key.
        max_seqlen_q: number of queries of the longest request, at least 0. Unused.
        max_seqlen_k: number of keys of the longest request, at least 0. It affects the launch only, not the result.
        softmax_scale: above 0; d_qk^-0.5 if None.
        causal: a query attends to no key after its position; if s_q > s_k, the first queries have no visible key.
        window: None; an int w ≥ 1: a query attends to its position and the w - 1 before it; or a pair (left, right): it
            attends to p - left to p + right, -1 for unbounded. ``causal`` limits right to 0.
        deterministic: make dq, dk and dv bitwise reproducible. (out and lse always are.)
        out: [T_q, h, d_v] in q's dtype to write to; last stride 1. It must not share memory with an input. Must be None
            if gradients are recorded.
        empty_lse: lse of a query that has no visible key, inf or -inf; its out and gradient are 0. NaN does not
            propagate from such a query or the gradients of its out and lse, nor from a key and value that are visible
            to no query.
        backend: "hopper", "portable" or "reference", for forward and backward; None selects one for each; a named
            backend that cannot run the call is an error. "hopper" supports head dims that are multiples of 8 from 64 to
            256; with gradients, 192 / 128 and 128 / 128.

    Returns:
        out [T_q, h, d_v] in q's dtype, and lse (natural logarithm), float32 (float64 for float64) [T_q, h] with strides
        (1, T_q).

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device; inconsistent arguments;
            cu_seqlens on the CPU that decrease or exceed their tensor; a backend that cannot run the call.
    """
    dtypes = (*checks.FLOAT_DTYPES, torch.float64)
    checks.tensor("q", q, ("T_q", "h", "d_qk"), dtypes, may_be_empty=1)
    total_q, h_q, head_dim = q.shape
    device = q.device
    checks.tensor("k", k, ("T_k", "h_k", head_dim), (q.dtype,), device, may_be_empty=1)
    total_k, h_k, _ = k.shape
    checks.tensor("v", v, (total_k, h_k, "d_v"), (q.dtype,), device)
    head_dim_v = v.shape[2]
    if h_q % h_k:
        raise ValueError(f"q must have a multiple of k's {h_k} heads, got {h_q}")
    checks.tensor("cu_seqlens_q", cu_seqlens_q, ("b + 1",), checks.INDEX_DTYPES, device)
    if cu_seqlens_q.shape[0] < 2 and total_q:
        raise ValueError(
            f"cu_seqlens_q must have shape [b + 1] with b at least 1 for q's {total_q} tokens, "
            f"got {list(cu_seqlens_q.shape)}"
        )
    checks.tensor("cu_seqlens_k", cu_seqlens_k, (cu_seqlens_q.shape[0],), checks.INDEX_DTYPES, device)
    ragged.check_boundaries("cu_seqlens_q", cu_seqlens_q, total_q)
    ragged.check_boundaries("cu_seqlens_k", cu_seqlens_k, total_k)
    checks.positive_int("max_seqlen_q", max_seqlen_q, or_zero=True)
    checks.positive_int("max_seqlen_k", max_seqlen_k, or_zero=True)
    left, right = ragged.window_sides(window, checks.flag("causal", causal))
    refuse_transforms(OPERATION, q, k, v)
    recorded = records_gradient(q, k, v)
    if out is not None:
        checks.output("out", out, (total_q, h_q, head_dim_v), (q.dtype,), device)
        checks.no_overlap("out", out, q=q, k=k, v=v)
        if recorded:
            raise ValueError("out must be None if gradients are recorded, got a tensor to write into")

    def call(operation: str) -> dispatch.CallSpec:
        return dispatch.CallSpec(
            operation,
            device,
            q.dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            h_q=h_q,
            h_kv=h_k,
            rows_aligned=checks.rows_aligned(q) and checks.rows_aligned(k) and checks.rows_aligned(v),
        )

    params = DensePrefillParams(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=checks.softmax_scale(softmax_scale, head_dim),
        window_left=left,
        window_right=right,
        empty_lse=checks.empty_lse(empty_lse),
    )
    deterministic = checks.flag("deterministic", deterministic)
    chosen = dispatch.select(call(OPERATION), backend)
    if out is not None:
        lse = _empty_lse(q)
        if total_q:
            _dense_prefill_out(params, chosen, out, lse)
        return out, lse
    chosen_backward = dispatch.select(call(BACKWARD), backend) if recorded else ""
    return _dense_prefill(*params, chosen, chosen_backward, deterministic)


def _fake_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2]), _empty_lse(q)


def _fake_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    tensors, numbers = inputs[:_NUM_TENSORS], inputs[_NUM_TENSORS:]
    ctx.save_for_backward(*tensors, *output)
    ctx.numbers = numbers


def _gradient(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * (_NUM_TENSORS + len(ctx.numbers))
    *tensors, out, lse = ctx.saved_tensors
    *numbers, _, backend, deterministic = ctx.numbers
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    gradients = _dense_prefill_backward(*tensors, *numbers, out, lse, dout, dlse, deterministic, backend)
    return *gradients, *[None] * (_NUM_TENSORS - len(gradients) + len(ctx.numbers))


def _no_second_derivative(*_: object) -> None:
    raise RuntimeError("dense_prefill has no second derivative: its gradient cannot be differentiated again")


@register_differentiable_op(BACKWARD, fake=_fake_backward, backward=_no_second_derivative, record=DensePrefillParams)
def _dense_prefill_backward(
    params: DensePrefillParams,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    deterministic: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gradients = _fake_backward(*params)
    if params.q.shape[0] == 0:
        return gradients[0], gradients[1].zero_(), gradients[2].zero_()
    _run_backward(params, DensePrefillGradients(out, lse, dout, dlse, deterministic, *gradients), backend)
    return gradients


@register_differentiable_op(
    OPERATION, fake=_fake_forward, backward=_gradient, setup_context=_keep, record=DensePrefillParams
)
def _dense_prefill(
    params: DensePrefillParams, backend: str, backward_backend: str, deterministic: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _fake_forward(*params)
    if params.q.shape[0]:
        _run_forward(params, out, lse, backend)
    return out, lse


@register_op("dense_prefill_out", mutates=("out", "lse"))
def _dense_prefill_out(params: DensePrefillParams, backend: str, out: torch.Tensor, lse: torch.Tensor) -> None:
    _run_forward(params, out, lse, backend)


@dispatch.implemented(OPERATION, hopper=_refuses_hopper, portable=_refuses_portable)
def _run_forward(params: DensePrefillParams, out: torch.Tensor, lse: torch.Tensor, backend: str) -> None:
    if backend == "hopper":
        from flashlatte.ops.dense_prefill.hopper.forward.launch import forward
    elif backend == "portable":
        from flashlatte.ops.dense_prefill.portable.launch import forward
    else:
        from flashlatte.ops.dense_prefill.reference import forward

    forward(params, out, lse)


@dispatch.implemented(BACKWARD, hopper=_refuses_hopper_backward, portable=_refuses_portable)
def _run_backward(params: DensePrefillParams, gradients: DensePrefillGradients, backend: str) -> None:
    if backend == "hopper":
        from flashlatte.ops.dense_prefill.hopper.backward.launch import backward
    elif backend == "portable":
        from flashlatte.ops.dense_prefill.portable.launch import backward
    else:
        from flashlatte.ops.dense_prefill.reference import backward

    backward(params, gradients)


def _empty_lse(q: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape[1], q.shape[0], dtype=dtype).T
