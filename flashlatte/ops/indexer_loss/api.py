"""``indexer_loss``: its arguments, their checks, the choice of implementations, and its gradient.

The loss is a scalar, so the forward pass computes its gradients too, and the backward pass multiplies them by the
incoming gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashlatte.ops.indexer_loss.reference import IndexerLossParams, IndexerLossResults
from flashlatte.runtime import checks, dispatch, refusals, value_checks
from flashlatte.runtime.gradients import refuse_transforms
from flashlatte.runtime.process_groups import group_name
from flashlatte.runtime.torch_op import records_gradient, register_differentiable_op

if TYPE_CHECKING:
    import torch.distributed as dist

OPERATION = "indexer_loss"
BACKWARD = "indexer_loss_backward"
_PORTABLE_MAX_HEAD_DIM = 576
# Gradients of a tile of index keys are accumulated in registers.
_PORTABLE_MAX_INDEX_DIM = 256
# Two consumers hold 64 heads each.
_HOPPER_MAX_HEADS = 128
_HOPPER_HEAD_DIMS = (576, 512)


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    if reason := refusals.triton_attention(call, _PORTABLE_MAX_HEAD_DIM):
        return reason
    if (call.index_dim or 0) <= _PORTABLE_MAX_INDEX_DIM:
        return None
    return f"takes index head dims up to {_PORTABLE_MAX_INDEX_DIM}, not {call.index_dim}"


def _refuses_hopper(call: dispatch.CallSpec) -> str | None:
    return (
        refusals.dtype(call, torch.bfloat16, torch.float16)
        or refusals.hopper(call)
        or (None if call.head_dim in _HOPPER_HEAD_DIMS else f"takes head dims 576 and 512, not {call.head_dim}")
        or refusals.unaligned(call)
        or (None if (call.h_q or 0) <= _HOPPER_MAX_HEADS else f"takes up to {_HOPPER_MAX_HEADS} heads, not {call.h_q}")
        or _refuses_portable(call)
    )


def indexer_loss(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    index_weights: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor | None = None,
    *,
    lse: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    key_start: torch.Tensor | None = None,
    key_end: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    index_scale: float | None = None,
    use_relu: bool = True,
    deterministic: bool = False,
    group: dist.ProcessGroup | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL divergence between the attention and the indexer's softmax, summed over queries; differentiable.

    The loss of DeepSeek-V3.2's indexer (its technical report, dense warm-up and sparse training stage). For each query,
    the target is the mean over heads of the attention probabilities, without a sink; the prediction is the softmax of
    the index logits Σ_h index_weights[h] · relu(index_scale · index_q[h] · index_k[j]). Both are over the keys that the
    query attends to. Gradients flow to index_q, index_k and index_weights. q, kv and the selection have no gradient,
    and there is no second derivative.

    A query attends to the keys that it selected (sparse stage), or to a range of keys (warm-up): pass either
    ``indices`` or ``key_start`` and ``key_end``. Queries are processed in blocks, so memory does not grow with queries
    times keys. If an input requires a gradient, the forward pass computes the gradients of index_q, index_k and
    index_weights and keeps them for the backward pass; q, kv and the selection are not kept.

    Args:
        index_q: [s_q, h_i, d_i], bf16, fp16, or float32 and float64 (reference only); s_q may be 0. d_i is 128 in
            DeepSeek-V3.2.
        index_k: [s_kv, d_i] in index_q's dtype.
        index_weights: [s_q, h_i] in index_q's dtype or float32.
        q: [s_q, h_q, d] in index_q's dtype.
        kv: [s_kv, 1, d] in index_q's dtype.
        indices: int32 or int64 [s_q, 1, topk], as for ``sparse_attention``. A token selected twice counts twice.
        lse: float32 (float64 for float64) [s_q, h_q], natural logarithm, of the attention of q over the same keys with
            the same softmax_scale, as ``sparse_attention`` returns it. Computed if None, which costs another pass over
            q and kv.
        topk_length: int32 or int64 [s_q], with ``indices``: the number of indices that count, from the first; all if
            None.
        key_start, key_end: int32 or int64 [s_q], without ``indices``: a query attends to keys key_start to key_end - 1.
        softmax_scale: scale of the attention scores, above 0; d^-0.5 if None.
        index_scale: scale of the index scores, above 0; d_i^-0.5 if None.
        use_relu: False omits the relu, as GLM-5's training may.
        deterministic: make the gradient of index_k bitwise reproducible with ``indices`` too. By default float32
            atomics sum it. (All other results are always reproducible, including the gradient of index_k without
            ``indices``.) Deterministic sums take up to 256 MiB of scratch and, for each 256 MiB of contributions (4 ·
            s_q · topk · d_i bytes in total), a sort and two launches.
        group: a process group of torch.distributed whose ranks have different attention heads (tensor parallelism).
            The probabilities are summed over the ranks before they are normalized, so that the target is the mean over
            the heads of all ranks: an in-place all-reduce for each block of queries, 4 · s_q · keys bytes in total. All
            arguments except q, kv and lse must be the same on every rank. The results and gradients are then the same
            too, and must not be summed over these ranks. The number of heads may differ between ranks. If a rank does
            not make the call, the others wait until the group's timeout.
        backend: "hopper", "portable" or "reference"; None selects one; a named backend that cannot run the call is an
            error. "hopper" supports head dims 576 and 512 and up to 128 heads.

    Returns:
        The sum of the divergences, float32 (float64 for float64), and the number of queries with at least one key,
        int64; both 0-dimensional. Their quotient is the mean over queries. Over several ranks, sum both before
        dividing.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device; inconsistent arguments; a
            backend that cannot run the call.
    """
    dtypes = (*checks.FLOAT_DTYPES, torch.float64)
    checks.tensor("index_q", index_q, ("s_q", "h_i", "d_i"), dtypes, may_be_empty=1)
    s_q, h_i, index_dim = index_q.shape
    device, dtype = index_q.device, index_q.dtype
    may_be_empty = 0 if s_q else 3
    checks.tensor("index_k", index_k, ("s_kv", index_dim), (dtype,), device, may_be_empty=min(may_be_empty, 1))
    s_kv = index_k.shape[0]
    checks.tensor("index_weights", index_weights, (s_q, h_i), (dtype, torch.float32), device)
    checks.tensor("q", q, (s_q, "h_q", "d"), (dtype,), device)
    head_dim = q.shape[2]
    checks.tensor("kv", kv, (s_kv, 1, head_dim), (dtype,), device)
    if lse is not None:
        checks.tensor("lse", lse, q.shape[:2], (_wide(dtype),), device, unit_last_stride=False)
    if indices is None:
        if key_start is None or key_end is None or topk_length is not None:
            raise ValueError("key_start and key_end must be given without indices, and topk_length only with indices")
        for name, limit in (("key_start", key_start), ("key_end", key_end)):
            checks.tensor(name, limit, (s_q,), checks.INDEX_DTYPES, device, unit_last_stride=False)
    else:
        if key_start is not None or key_end is not None:
            raise ValueError("key_start and key_end must be None with indices")
        checks.tensor("indices", indices, (s_q, 1, "topk"), checks.INDEX_DTYPES, device, may_be_empty=may_be_empty)
        if topk_length is None:
            value_checks.entries("indices", indices, s_kv)
        else:
            checks.tensor("topk_length", topk_length, (s_q,), checks.INDEX_DTYPES, device, unit_last_stride=False)
            value_checks.selections("indices", indices, "topk_length", topk_length, s_kv)
    refuse_transforms(OPERATION, index_q, index_k, index_weights, q, kv)
    call = dispatch.CallSpec(
        OPERATION,
        device,
        dtype,
        head_dim=head_dim,
        index_dim=index_dim,
        h_q=q.shape[1],
        h_kv=1,
        rows_aligned=checks.rows_aligned(q) and checks.rows_aligned(kv),
    )
    params = IndexerLossParams(
        index_q=index_q,
        index_k=index_k,
        index_weights=index_weights,
        q=q.detach(),
        kv=kv.detach(),
        lse=None if lse is None else lse.detach(),
        indices=indices,
        topk_length=topk_length,
        key_start=key_start,
        key_end=key_end,
        softmax_scale=checks.softmax_scale(softmax_scale, head_dim),
        index_scale=checks.softmax_scale(index_scale, index_dim, "index_scale"),
        use_relu=checks.flag("use_relu", use_relu),
        deterministic=checks.flag("deterministic", deterministic),
        group=group_name(group),
        with_gradient=records_gradient(index_q, index_k, index_weights),
    )
    results = _indexer_loss(*params, dispatch.select(call, backend))
    return results[0], results[1]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _fake_forward(*args: Any) -> IndexerLossResults:
    params = IndexerLossParams._make(args[: len(IndexerLossParams._fields)])
    index_q, index_k, index_weights = params.index_q, params.index_k, params.index_weights
    wide = _wide(index_q.dtype)
    shapes = (index_q.shape, index_k.shape, index_weights.shape) if params.with_gradient else ((0,), (0,), (0,))
    return IndexerLossResults(
        loss=index_q.new_empty((), dtype=wide),
        num_rows=index_q.new_empty((), dtype=torch.int64),
        d_index_q=index_q.new_empty(shapes[0]),
        d_index_k=index_k.new_empty(shapes[1], dtype=wide),
        d_index_weights=index_weights.new_empty(shapes[2], dtype=wide),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[2:])
    ctx.dtypes = [x.dtype for x in inputs[:3]]
    ctx.others = len(inputs) - 3


def _gradient(ctx: Any, d_loss: torch.Tensor | None, *_: object) -> tuple[torch.Tensor | None, ...]:
    if torch.is_grad_enabled():
        _no_second_derivative()
    if d_loss is None:
        return (None,) * (3 + ctx.others)
    return *_indexer_loss_backward(d_loss, *ctx.saved_tensors, *ctx.dtypes), *[None] * ctx.others


def _no_second_derivative(*_: object) -> None:
    raise RuntimeError("indexer_loss has no second derivative: its backward pass does not run with create_graph=True")


def _fake_backward(
    d_loss: torch.Tensor,
    d_index_q: torch.Tensor,
    d_index_k: torch.Tensor,
    d_index_weights: torch.Tensor,
    *dtypes: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first, second, third = (
        torch.empty_like(x, dtype=dtype)
        for x, dtype in zip((d_index_q, d_index_k, d_index_weights), dtypes, strict=True)
    )
    return first, second, third


@register_differentiable_op(BACKWARD, fake=_fake_backward, backward=_no_second_derivative)
def _indexer_loss_backward(
    d_loss: torch.Tensor,
    d_index_q: torch.Tensor,
    d_index_k: torch.Tensor,
    d_index_weights: torch.Tensor,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    weights_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The saved gradients times the incoming gradient of the loss, in the dtypes of the inputs."""
    gradients = _fake_backward(d_loss, d_index_q, d_index_k, d_index_weights, q_dtype, k_dtype, weights_dtype)
    for result, of_sum in zip(gradients, (d_index_q, d_index_k, d_index_weights), strict=True):
        # Not 0-dimensional: PyTorch would round such a factor to bf16.
        torch.mul(of_sum, d_loss.reshape([1] * of_sum.dim()), out=result)
    return gradients


@register_differentiable_op(
    OPERATION, fake=_fake_forward, backward=_gradient, setup_context=_keep, record=IndexerLossParams
)
def _indexer_loss(
    params: IndexerLossParams, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, its number of rows, and the gradients of the loss, which are empty unless ``with_gradient``."""
    results = _fake_forward(*params)
    if params.q.shape[0]:
        _run(params, results, backend)
    else:
        for result in results:
            result.zero_()
    return results


@dispatch.implemented(OPERATION, hopper=_refuses_hopper, portable=_refuses_portable)
def _run(params: IndexerLossParams, results: IndexerLossResults, backend: str) -> None:
    if backend == "hopper":
        from flashlatte.ops.indexer_loss.hopper.launch import loss_and_gradients
    elif backend == "portable":
        from flashlatte.ops.indexer_loss.portable.launch import loss_and_gradients
    else:
        from flashlatte.ops.indexer_loss.reference import loss_and_gradients

    loss_and_gradients(params, results)
