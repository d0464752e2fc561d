"""``merge_states``: its arguments, their checks, and the choice of implementation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashlatte.ops.merge_states import reference
from flashlatte.runtime import checks, dispatch, refusals
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import records_gradient, register_op

OPERATION = "merge_states"

dispatch.define(
    OPERATION,
    dispatch.Implementation("portable", "flashlatte.ops.merge_states.portable:merge_states_into", refusals.triton),
    dispatch.Implementation("reference", "flashlatte.ops.merge_states.reference:merge_states_into"),
)


@repeats_launches
def merge_states(
    outs: Sequence[torch.Tensor] | torch.Tensor,
    lses: Sequence[torch.Tensor] | torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention results of the same queries over disjoint sets of keys into the result over all keys.

    lse = log Σ e^lse_i and out = Σ e^(lse_i - lse) · out_i (arXiv:2501.01005, §2.2). Where gradients are
    recorded, they flow to every out_i and lse_i.

    Args:
        outs: n ≥ 2 tensors [..., d] (tokens, heads, values, say), bf16, fp16 or float32; or one [n, ..., d]. Any axis
            may be empty.
        lses: for each its natural-log float32 [...], or one [n, ...]. An infinite lse of either sign marks a part
            without keys, whose out is not looked at.
        out: like one of ``outs``, to write into.
        lse: like one of ``lses``, to write into.
        backend: "portable" or "reference"; None chooses, a name is obeyed or refused.

    Returns:
        out in the dtype of ``outs``, and lse, natural logarithm, float32. Where every part is empty, 0 and -inf.

    Raises:
        TypeError, ValueError: fewer than two parts, parts that differ in shape, dtype or device, or an output of
            a wrong shape.
    """
    outs = _parts("outs", outs)
    lses = _parts("lses", lses)
    if len(outs) < 2 or len(outs) != len(lses):
        raise ValueError(
            f"outs and lses must hold the same number of parts, at least 2, got {len(outs)} and {len(lses)}"
        )
    first = outs[0]
    if first.dim() < 1:
        raise ValueError("outs must hold tensors of shape [..., d], got a scalar")
    for index, (part, part_lse) in enumerate(zip(outs, lses, strict=True)):
        dtypes = checks.FLOAT_DTYPES if index == 0 else (first.dtype,)
        checks.tensor(f"outs[{index}]", part, tuple(first.shape), dtypes, first.device, unit_last_stride=False)
        checks.tensor(
            f"lses[{index}]",
            part_lse,
            tuple(first.shape[:-1]),
            (torch.float32,),
            first.device,
            unit_last_stride=False,
        )
    if records_gradient(*outs, *lses):
        if out is not None or lse is not None:
            raise ValueError("out and lse must be None where gradients are recorded, got tensors to write into")
        if backend not in (None, "reference"):
            raise ValueError(f"backend must be 'reference' or None where gradients are recorded, got {backend!r}")
        return reference.merge_states(outs, lses)
    call = dispatch.Call(OPERATION, first.device, first.dtype, head_dim_v=first.shape[-1])
    backend = dispatch.select(call, backend)
    if out is None:
        out = torch.empty_like(first, memory_format=torch.contiguous_format)
    else:
        checks.output("out", out, tuple(first.shape), (first.dtype,), first.device, unit_last_stride=False)
    if lse is None:
        lse = torch.empty(first.shape[:-1], dtype=torch.float32, device=first.device)
    else:
        checks.output("lse", lse, tuple(first.shape[:-1]), (torch.float32,), first.device, unit_last_stride=False)
    if lse.numel():
        _merge_states(outs, lses, out, lse, backend)
    return out, lse


@register_op("merge_states", mutates=("out", "lse"))
def _merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    backend: str,
) -> None:
    dispatch.implementation(OPERATION, backend)(outs, lses, out, lse)


def _parts(name: str, value: Sequence[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.dim() < 1:
            raise ValueError(f"{name} must be a sequence of tensors or one stacked tensor, got a scalar")
        return list(value.unbind(0))
    if not isinstance(value, Sequence) or not all(isinstance(part, torch.Tensor) for part in value):
        raise TypeError(f"{name} must be a sequence of tensors or one stacked tensor, got {type(value).__name__}")
    return list(value)
