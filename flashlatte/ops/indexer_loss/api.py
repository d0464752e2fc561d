"""``indexer_loss``: its arguments, their checks, and its gradient. The reference is its only implementation."""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.ops.indexer_loss import reference
from flashlatte.runtime import checks, value_checks
from flashlatte.runtime.gradients import refuse_tangents
from flashlatte.runtime.torch_op import register_differentiable_op

OPERATION = "indexer_loss"
BACKWARD = "indexer_loss_backward"


def indexer_loss(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    index_weights: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor | None = None,
    *,
    topk_length: torch.Tensor | None = None,
    key_start: torch.Tensor | None = None,
    key_end: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    index_scale: float | None = None,
    use_relu: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL divergence of the indexer's softmax from the attention that it predicts, summed over queries; differentiable.

    The loss of DeepSeek-V3.2's indexer (its technical report, dense warm-up and sparse training stage). Of each query,
    over the keys that it sees: the target is the mean over heads of the attention probabilities, without a sink; the
    prediction is the softmax of the index logits Σ_h index_weights[h] · relu(index_scale · index_q[h] · index_k[j]).
    Gradients flow to index_q, index_k and index_weights. q, kv and the selection belong to the attention: they have no
    gradient, and there is no second derivative.

    A query sees the keys that it selected (sparse stage), or a range of keys (warm-up): give either ``indices`` or
    ``key_start`` and ``key_end``. No tensor of queries by keys is kept.

    Args:
        index_q: [s_q, h_i, d_i], bf16, fp16, float32 or float64.
        index_k: [s_kv, d_i] in index_q's dtype.
        index_weights: [s_q, h_i] in index_q's dtype or float32.
        q: [s_q, h_q, d] in index_q's dtype.
        kv: [s_kv, 1, d] in index_q's dtype.
        indices: int32 or int64 [s_q, 1, topk], as for ``sparse_attention``. A token selected twice counts twice.
        topk_length: int32 or int64 [s_q], with ``indices``: only the first so many indices of a query count.
        key_start, key_end: int32 or int64 [s_q], without ``indices``: a query sees keys key_start to key_end - 1.
        softmax_scale: of the attention, above 0; d^-0.5 if None.
        index_scale: of the index scores, above 0; d_i^-0.5 if None.
        use_relu: False omits the relu, as GLM-5's training may.

    Returns:
        The sum of the divergences, float32 (float64 for float64), and the number of queries that see a key, int64; both
        0-dimensional. Their quotient is the mean over queries; sums of several ranks add up.

    Raises:
        TypeError, ValueError: arguments of a wrong type, dtype, shape, stride or device, or that contradict each other.
    """
    dtypes = (*checks.FLOAT_DTYPES, torch.float64)
    checks.tensor("index_q", index_q, ("s_q", "h_i", "d_i"), dtypes)
    s_q, h_i, index_dim = index_q.shape
    device, dtype = index_q.device, index_q.dtype
    checks.tensor("index_k", index_k, ("s_kv", index_dim), (dtype,), device)
    s_kv = index_k.shape[0]
    checks.tensor("index_weights", index_weights, (s_q, h_i), (dtype, torch.float32), device)
    checks.tensor("q", q, (s_q, "h_q", "d"), (dtype,), device)
    checks.tensor("kv", kv, (s_kv, 1, q.shape[2]), (dtype,), device)
    if indices is None:
        if key_start is None or key_end is None or topk_length is not None:
            raise ValueError("key_start and key_end must be given without indices, and topk_length only with indices")
        for name, limit in (("key_start", key_start), ("key_end", key_end)):
            checks.tensor(name, limit, (s_q,), checks.INDEX_DTYPES, device, unit_last_stride=False)
    else:
        if key_start is not None or key_end is not None:
            raise ValueError("key_start and key_end must be None with indices")
        checks.tensor("indices", indices, (s_q, 1, "topk"), checks.INDEX_DTYPES, device)
        if topk_length is None:
            value_checks.entries("indices", indices, s_kv)
        else:
            checks.tensor("topk_length", topk_length, (s_q,), checks.INDEX_DTYPES, device, unit_last_stride=False)
            value_checks.selections("indices", indices, "topk_length", topk_length, s_kv)
    refuse_tangents(OPERATION, index_q, index_k, index_weights, q, kv)
    return _indexer_loss(
        index_q,
        index_k,
        index_weights,
        q.detach(),
        kv.detach(),
        indices,
        topk_length,
        key_start,
        key_end,
        checks.softmax_scale(softmax_scale, q.shape[2]),
        checks.softmax_scale(index_scale, index_dim, "index_scale"),
        checks.flag("use_relu", use_relu),
    )


def _fake_forward(index_q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(index_q.dtype, torch.float32)
    return index_q.new_empty((), dtype=dtype), index_q.new_empty((), dtype=torch.int64)


def _fake_backward(
    d_loss: torch.Tensor, index_q: torch.Tensor, index_k: torch.Tensor, index_weights: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        index_q.new_empty(index_q.shape),
        index_k.new_empty(index_k.shape),
        index_weights.new_empty(index_weights.shape),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.numbers = inputs[9:]


def _gradient(ctx: Any, d_loss: torch.Tensor | None, _: object) -> tuple[torch.Tensor | None, ...]:
    if d_loss is None:
        return (None,) * (9 + len(ctx.numbers))
    gradients = _indexer_loss_backward(d_loss, *ctx.saved_tensors, *ctx.numbers)
    return *gradients, *[None] * (6 + len(ctx.numbers))


def _no_second_derivative(*_: object) -> None:
    raise RuntimeError("indexer_loss has no second derivative: its gradient cannot be differentiated again")


@register_differentiable_op(BACKWARD, fake=_fake_backward, backward=_no_second_derivative)
def _indexer_loss_backward(
    d_loss: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    index_weights: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    key_start: torch.Tensor | None,
    key_end: torch.Tensor | None,
    softmax_scale: float,
    index_scale: float,
    use_relu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gradients = _fake_backward(d_loss, index_q, index_k, index_weights)
    attention = q, kv, indices, topk_length, key_start, key_end
    reference.backward(
        d_loss, index_q, index_k, index_weights, *attention, softmax_scale, index_scale, use_relu, *gradients
    )
    return gradients


@register_differentiable_op(OPERATION, fake=_fake_forward, backward=_gradient, setup_context=_keep)
def _indexer_loss(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    index_weights: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    key_start: torch.Tensor | None,
    key_end: torch.Tensor | None,
    softmax_scale: float,
    index_scale: float,
    use_relu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    loss, num_rows = _fake_forward(index_q)
    attention = q, kv, indices, topk_length, key_start, key_end
    reference.forward(index_q, index_k, index_weights, *attention, softmax_scale, index_scale, use_relu, loss, num_rows)
    return loss, num_rows
