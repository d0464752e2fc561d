"""``concat_mla_q``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.runtime import checks, dispatch, gradients, refusals
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "concat_mla_q"
DTYPES = (*checks.FLOAT_DTYPES, torch.float8_e4m3fn)


@repeats_launches
def concat_mla_q(
    ql_nope: torch.Tensor, q_pe: torch.Tensor, *, out: torch.Tensor | None = None, backend: str | None = None
) -> torch.Tensor:
    """Concatenate the latent and rotated parts of queries to [T, H, latent + rope], as decode takes them.

    ``torch.cat`` of two 3-D tensors in one pass, also for strided parts (such as the transposed result of a batched
    matmul). It has no backward pass, and warns once if gradients are enabled and an input requires one.

    Args:
        ql_nope: [T, H, latent], last stride 1; bf16, fp16, float32 or float8_e4m3fn. T may be 0.
        q_pe: [T, H, rope] in the same dtype.
        out: [T, H, latent + rope] to write to, last stride 1. It must not overlap the parts.
        backend: "portable" or "reference"; None selects one.

    Returns:
        ``out``, in the parts' dtype: the latent part of each head, then its rotated part.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device.
    """
    checks.tensor("ql_nope", ql_nope, ("T", "H", "latent"), DTYPES, may_be_empty=1)
    tokens, heads, latent = ql_nope.shape
    checks.tensor("q_pe", q_pe, (tokens, heads, "rope"), (ql_nope.dtype,), ql_nope.device)
    shape = (tokens, heads, latent + q_pe.shape[2])
    out = checks.output_or_new("out", out, shape, ql_nope.dtype, ql_nope.device, ql_nope=ql_nope, q_pe=q_pe)
    gradients.warn_if_dropped(OPERATION, ql_nope, q_pe)
    call = dispatch.CallSpec(OPERATION, ql_nope.device, ql_nope.dtype, head_dim=shape[2], h_q=heads)
    backend = dispatch.select(call, backend)
    if tokens:
        _concat_mla_q(ql_nope, q_pe, out, backend)
    return out


@register_op(OPERATION, mutates=("out",))
@dispatch.implemented(OPERATION, portable=refusals.triton)
def _concat_mla_q(ql_nope: torch.Tensor, q_pe: torch.Tensor, out: torch.Tensor, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.concat_mla_q.portable import concat_mla_q
    else:
        from flashlatte.ops.concat_mla_q.reference import concat_mla_q

    concat_mla_q(ql_nope, q_pe, out)
