"""``merge_states``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashlatte.kv_cache import scales
from flashlatte.ops.merge_states import reference
from flashlatte.ops.merge_states.reference import MergeStatesParams
from flashlatte.runtime import checks, dispatch, refusals
from flashlatte.runtime.gradients import refuse_tangents
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import records_gradient, register_op

OPERATION = "merge_states"


def merge_states(
    outs: Sequence[torch.Tensor] | torch.Tensor,
    lses: Sequence[torch.Tensor] | torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    context_tokens: int | torch.Tensor | None = None,
    out_scale: float | torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention results of the same queries over disjoint sets of keys.

    lse = log Σ e^lse_i and out = Σ e^(lse_i - lse) · out_i (arXiv:2501.01005, §2.2). If gradients are recorded, they
    flow to every out_i and lse_i.

    Args:
        outs: n ≥ 1 tensors [..., d] (such as [tokens, heads, d]), bf16, fp16 or float32; or one [n, ..., d]. Any axis
            may be empty.
        lses: natural-log float32 [...] of each, or one [n, ...]. An infinite lse of either sign marks a state without
            keys, whose out is not read.
        out: to write to, like one of ``outs``; float8_e4m3fn with ``out_scale``.
        lse: to write to, like one of ``lses``.
        context_tokens: entries of the first axis from this index on are copied from the last state, including an
            infinite lse, and the other states are not read: for example tokens of requests without a context, placed
            after the others. A number, or a one-element int32 or int64 tensor, whose value may change between replays
            of a CUDA graph. None: all entries are merged.
        out_scale: out is float8_e4m3fn: the result times 1 / out_scale, saturated at 448. A number, or a one-element
            float32 tensor on the device of ``outs``.
        backend: "portable" or "reference"; None selects one; a named backend that cannot run the call is an error.

    Returns:
        out in the dtype of ``outs`` (float8_e4m3fn with ``out_scale``), and lse (natural logarithm), float32. If all
        states are empty, 0 and -inf.

    Raises:
        TypeError, ValueError: no state, states that differ in shape, dtype or device, or an output of the
            wrong shape.
    """
    return _merge_parts(_parts("outs", outs), _parts("lses", lses), out, lse, context_tokens, out_scale, backend)


@repeats_launches
def _merge_parts(
    outs: list[torch.Tensor],
    lses: list[torch.Tensor],
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    context_tokens: int | torch.Tensor | None,
    out_scale: float | torch.Tensor | None,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``merge_states`` with a list of tensors instead of a stack: ``repeats_launches`` matches tensors by address."""
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"outs and lses must hold the same number of parts, at least 1, got {len(outs)} and {len(lses)}"
        )
    first = checks.given("outs[0]", outs[0])
    if first.dim() < 1:
        raise ValueError("outs[0] must have shape [..., d], got a scalar")
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
    context_tensor, context_number = _check_context(context_tokens, first)
    if records_gradient(*outs, *lses):
        if out is not None or lse is not None:
            raise ValueError("out and lse must be None if gradients are recorded, got tensors to write into")
        if out_scale is not None:
            raise ValueError("out_scale must be None if gradients are recorded, as e4m3 has none, got one")
        if backend not in (None, "reference"):
            raise ValueError(f"backend must be 'reference' or None if gradients are recorded, got {backend!r}")
        return reference.merge_states(outs, lses, context_tokens)
    scale_tensor, scale_value = scales.split("out_scale", out_scale, first.device)
    out_dtype = first.dtype if out_scale is None else torch.float8_e4m3fn
    call = dispatch.CallSpec(OPERATION, first.device, first.dtype, head_dim_v=first.shape[-1])
    refuse_tangents(OPERATION, *outs, *lses)
    backend = dispatch.select(call, backend)
    if out is None:
        out = torch.empty_like(first, dtype=out_dtype, memory_format=torch.contiguous_format)
    else:
        checks.output("out", out, tuple(first.shape), (out_dtype,), first.device, unit_last_stride=False)
    lse = checks.output_or_new("lse", lse, first.shape[:-1], torch.float32, first.device, unit_last_stride=False)
    if lse.numel():
        params = MergeStatesParams(
            outs=outs,
            lses=lses,
            out=out,
            lse=lse,
            context_tensor=context_tensor,
            context_tokens=context_number,
            scale_tensor=scale_tensor,
            scale_value=scale_value,
        )
        _merge_states(params, backend)
    return out, lse


def merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
    prefill_tokens_with_context: int | torch.Tensor | None = None,
    output_scale: float | torch.Tensor | None = None,
) -> None:
    """``merge_states`` of two states, with vLLM's arguments.

    An infinite lse of either sign marks an empty state; if both are empty, the result is 0 and -inf.

    Args:
        output: [tokens, heads, d], written to; the dtype of the inputs, bf16, fp16 or float32, or float8_e4m3fn with
            ``output_scale``.
        prefix_output, suffix_output: [tokens, heads, d].
        prefix_lse, suffix_lse: float32 [heads, tokens], natural logarithm, any strides.
        output_lse: float32 [heads, tokens], written to if given.
        prefill_tokens_with_context: tokens from this index on are copied from the suffix, with their lse.
        output_scale: scale of an e4m3 output: the result times 1 / output_scale.

    Raises:
        TypeError, ValueError: as ``merge_states``.
    """
    checks.tensor("prefix_output", prefix_output, ("tokens", "heads", "d"), checks.FLOAT_DTYPES, may_be_empty=3)
    tokens, heads = prefix_output.shape[:2]
    checks.given("suffix_output", suffix_output)
    checks.given("output", output)
    lses = {"prefix_lse": prefix_lse, "suffix_lse": suffix_lse, "output_lse": output_lse}
    for name, value in lses.items():
        if name != "output_lse" or value is not None:
            checks.tensor(name, value, (heads, tokens), (torch.float32,), unit_last_stride=False)
    names = {"outs[1]": "suffix_output", "lses[0]": "prefix_lse", "lses[1]": "suffix_lse", "lse": "output_lse"}
    given = {"out": "output", "context_tokens": "prefill_tokens_with_context", "out_scale": "output_scale"}
    with checks.naming(**names, **given):
        merge_states(
            [prefix_output, suffix_output],
            [prefix_lse.T, suffix_lse.T],
            out=output,
            lse=None if output_lse is None else output_lse.T,
            context_tokens=prefill_tokens_with_context,
            out_scale=output_scale,
        )


@register_op(OPERATION, mutates=("out", "lse"))
@dispatch.implemented(OPERATION, portable=refusals.triton)
def _merge_states(params: MergeStatesParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.merge_states.portable import merge_states_into
    else:
        from flashlatte.ops.merge_states.reference import merge_states_into

    merge_states_into(params)


def _check_context(value: int | torch.Tensor | None, first: torch.Tensor) -> tuple[torch.Tensor | None, int | None]:
    """context_tokens as (tensor, None) or (None, number); (None, None) if it is None."""
    if value is None:
        return None, None
    if first.dim() < 2:
        raise ValueError(f"context_tokens must be None for outs without a leading axis, got {value!r}")
    if not isinstance(value, torch.Tensor):
        return None, checks.positive_int("context_tokens", value, or_zero=True)
    if checks.given("context_tokens", value).dtype not in checks.INDEX_DTYPES:
        raise TypeError(f"context_tokens must be an int or an int32 or int64 tensor, got {value.dtype}")
    if value.numel() != 1 or value.device != first.device:
        raise ValueError(
            f"context_tokens must have one element on {first.device}, got shape {list(value.shape)} on {value.device}"
        )
    return value.reshape(()), None


def _parts(name: str, value: Sequence[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if checks.given(name, value).dim() < 1:
            raise ValueError(f"{name} must be a sequence of tensors or one stacked tensor, got a scalar")
        return list(value.unbind(0))
    # A list first: isinstance with Sequence alone runs Python code.
    if not isinstance(value, (list, tuple, Sequence)) or not all(isinstance(part, torch.Tensor) for part in value):
        raise TypeError(f"{name} must be a sequence of tensors or one stacked tensor, got {type(value).__name__}")
    return list(value)
