"""Results and gradients of differentiable operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def sparse_attention_gradients(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    inputs: dict[str, Any],
    with_dlse: bool = True,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """out, lse, dq, dkv and, with a sink, its gradient, for arguments of ``SparsePrefillCase`` and random gradients of
    out and lse; these are NaN for queries that select nothing.

    An oracle gets leaves in float64, so that its gradients are float64.
    """
    is_oracle = function.__module__.endswith("oracles")
    names = [name for name in ("q", "kv", "attn_sink") if inputs[name] is not None]
    leaves = {name: (inputs[name].double() if is_oracle else inputs[name].detach()).requires_grad_() for name in names}
    out, lse = function(**(inputs | leaves | options))
    generator = torch.Generator(out.device).manual_seed(1)
    dout = (torch.randn(out.shape, generator=generator, device=out.device) / 10).to(inputs["q"].dtype).to(out.dtype)
    dlse = (torch.randn(lse.shape, generator=generator, device=out.device) / 10).to(lse.dtype)
    if not is_oracle:
        empty = lse.isinf()
        dout, dlse = dout.masked_fill(empty[..., None], torch.nan), dlse.masked_fill(empty, torch.nan)
    # An oracle reads nothing for queries that select nothing.
    results = [(out, dout), (lse, dlse)][: 2 if with_dlse else 1]
    results = [(result, gradient) for result, gradient in results if result.requires_grad]
    found: list[torch.Tensor | None] = [None] * len(leaves)
    if results:
        outputs, gradients = zip(*results, strict=True)
        found = list(torch.autograd.grad(outputs, list(leaves.values()), gradients, allow_unused=is_oracle))
    return (
        out.detach(),
        lse.detach(),
        *(torch.zeros_like(leaf) if x is None else x for x, leaf in zip(found, leaves.values(), strict=True)),
    )
