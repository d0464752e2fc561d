"""``concat_mla_q``: its arguments, their checks, and the choice of implementation."""

from __future__ import annotations

import torch

from flashlatte.runtime import checks, dispatch, gradients, refusals
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "concat_mla_q"
DTYPES = (*checks.FLOAT_DTYPES, torch.float8_e4m3fn)


def _load_portable() -> dispatch.Function:
    from flashlatte.ops.concat_mla_q.portable import concat_mla_q

    return concat_mla_q


def _load_reference() -> dispatch.Function:
    from flashlatte.ops.concat_mla_q.reference import concat_mla_q

    return concat_mla_q


dispatch.define(
    OPERATION,
    dispatch.Implementation("portable", _load_portable, refusals.triton),
    dispatch.Implementation("reference", _load_reference),
)


@repeats_launches
def concat_mla_q(
    ql_nope: torch.Tensor, q_pe: torch.Tensor, *, out: torch.Tensor | None = None, backend: str | None = None
) -> torch.Tensor:
    """The query [T, H, latent + rope] that decode takes, of its latent and rotated parts, wherever these lie.

    ``torch.cat`` of two 3-D tensors in one pass that reads strided parts (a transposed result of a batched product,
    say) where they are. No gradient flows through it: a warning, once, says so where gradients are recorded and an
    input requires one.

    Args:
        ql_nope: [T, H, latent], last stride 1; bf16, fp16, float32 or float8_e4m3fn. T may be 0.
        q_pe: [T, H, rope] in the same dtype.
        out: [T, H, latent + rope] to write into, last stride 1. It may not overlap the parts.
        backend: "portable" or "reference"; None chooses.

    Returns:
        ``out``, in the parts' dtype: the latent part of each head, then its rotated one.

    Raises:
        TypeError, ValueError: arguments of a wrong type, dtype, shape, stride or device.
    """
    checks.tensor("ql_nope", ql_nope, ("T", "H", "latent"), DTYPES, may_be_empty=1)
    tokens, heads, latent = ql_nope.shape
    checks.tensor("q_pe", q_pe, (tokens, heads, "rope"), (ql_nope.dtype,), ql_nope.device)
    shape = (tokens, heads, latent + q_pe.shape[2])
    if out is None:
        out = torch.empty(shape, dtype=ql_nope.dtype, device=ql_nope.device)
    else:
        checks.output("out", out, shape, (ql_nope.dtype,), ql_nope.device)
        checks.no_overlap("out", out, ql_nope=ql_nope, q_pe=q_pe)
    gradients.warn_if_dropped(OPERATION, ql_nope, q_pe)
    call = dispatch.CallSpec(OPERATION, ql_nope.device, ql_nope.dtype, head_dim=shape[2], h_q=heads)
    backend = dispatch.select(call, backend)
    if tokens:
        _concat_mla_q(ql_nope, q_pe, out, backend)
    return out


@register_op(OPERATION, mutates=("out",))
def _concat_mla_q(ql_nope: torch.Tensor, q_pe: torch.Tensor, out: torch.Tensor, backend: str) -> None:
    dispatch.implementation(OPERATION, backend)(ql_nope, q_pe, out)
