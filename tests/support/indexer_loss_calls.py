"""Arguments of ``indexer_loss``, and its results with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashlatte.testing.cases import SparsePrefillCase
from flashlatte.testing.draws import Draw, with_gaps

LEAVES = ("index_q", "index_k", "index_weights")
NAMES = ("loss", "num_rows", *(f"d_{name}" for name in LEAVES))


def arguments(
    case: SparsePrefillCase,
    dense: bool,
    h_i: int = 3,
    index_dim: int = 6,
    weights_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Selected keys, or ranges of keys if ``dense``. Keys that are visible to no query, and queries without visible
    keys, are NaN."""
    given = case.inputs(device)
    draw = Draw(case.seed + 1, device)
    dtype = dtype or case.dtype
    q, kv = given["q"].to(dtype), given["kv"].to(dtype)
    found = {
        "index_q": draw.normal(case.s_q, h_i, index_dim, dtype=dtype, factor=2.0),
        "index_k": draw.normal(case.s_kv, index_dim, dtype=dtype, factor=2.0),
        "index_weights": draw.normal(case.s_q, h_i, dtype=weights_dtype or dtype, factor=2.0),
        "q": q,
        "kv": kv,
        "softmax_scale": case.softmax_scale,
    }
    if dense:
        kv.nan_to_num_(nan=0.1)
        start = draw.integers(-3, case.s_kv + 3, case.s_q)
        end = start + draw.integers(-3, case.s_kv, case.s_q)
        found |= {"key_start": start.to(case.index_dtype), "key_end": end.to(case.index_dtype)}
        first, last = (x.clamp(0, case.s_kv)[:, None] for x in (start, end))
        position = torch.arange(case.s_kv, device=device)
        seen = (position >= first) & (position < last)
        unseen, empty = ~seen.any(dim=0), ~seen.any(dim=1)
        kv[unseen] = torch.nan
    else:
        found |= {"indices": given["indices"], "topk_length": given["topk_length"]}
        unseen = kv.isnan().any(dim=-1)[:, 0]
        valid = (given["indices"] >= 0) & (given["indices"] < case.s_kv)
        if given["topk_length"] is not None:
            valid &= torch.arange(case.topk, device=device) < given["topk_length"][:, None, None]
        empty = ~valid[:, 0].any(dim=-1)
    found["index_k"][unseen] = torch.nan
    for name in ("q", "index_q", "index_weights"):
        found[name][empty] = torch.nan
    if case.strided:
        found |= {name: with_gaps(found[name]) for name in LEAVES}
    return found


def with_gradients(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]], given: dict[str, Any], **options: Any
) -> tuple[torch.Tensor, ...]:
    """The loss, its number of rows, and the gradients of half of the loss; those of an oracle are in float64."""
    is_oracle = function.__module__.endswith("oracles")
    leaves = {name: given[name].double() if is_oracle else given[name].detach() for name in LEAVES}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    loss, num_rows = function(**given | leaves | options)
    # An oracle reads nothing for queries without visible keys.
    found = torch.autograd.grad(loss * 0.5, list(leaves.values())) if loss.requires_grad else None
    return loss.detach(), num_rows, *(found or [torch.zeros_like(leaf) for leaf in leaves.values()])
