"""``index_weights``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.runtime import checks, dispatch, gradients, refusals
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "index_weights"
# With this many rows it takes 10 µs, PyTorch 19 (H200); the advantage shrinks with each row.
MAX_ROWS = 128


@repeats_launches
def index_weights(hidden: torch.Tensor, weight: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """The weights of an indexer's heads, hidden · weightᵀ in float32, for the few rows of a decode step.

    The projection is float32 while hidden states have 16 bits (DeepSeek-V3.2). PyTorch needs three kernels (cast,
    split-K matmul, reduction) of 14 µs; this is a single kernel. It has no backward pass.

    Args:
        hidden: [T, n], bf16, fp16 or float32, last stride 1. T may be 0. With more than ``MAX_ROWS`` rows it is
            correct, but slower than PyTorch.
        weight: float32 [H, n], last stride 1.
        backend: "portable" or "reference"; None selects one.

    Returns:
        float32 [T, H].

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device.
    """
    checks.tensor("hidden", hidden, ("T", "n"), checks.FLOAT_DTYPES, may_be_empty=1)
    tokens, width = hidden.shape
    checks.tensor("weight", weight, ("H", width), (torch.float32,), hidden.device)
    out = torch.empty(tokens, weight.shape[0], dtype=torch.float32, device=hidden.device)
    gradients.warn_if_dropped(OPERATION, hidden, weight)
    backend = dispatch.select(dispatch.CallSpec(OPERATION, hidden.device, hidden.dtype, head_dim=width), backend)
    if tokens:
        _index_weights(hidden, weight, out, backend)
    return out


@register_op(OPERATION, mutates=("out",))
@dispatch.implemented(OPERATION, portable=refusals.triton)
def _index_weights(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.index_weights.portable import index_weights
    else:
        from flashlatte.ops.index_weights.reference import index_weights

    index_weights(hidden, weight, out)
