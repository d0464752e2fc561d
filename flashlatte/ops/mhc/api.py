"""``mhc_pre`` and ``mhc_post``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.ops.mhc.reference import MhcPreParams
from flashlatte.runtime import checks, dispatch, gradients, refusals
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

PRE, POST = "mhc_pre", "mhc_post"
# A program holds the whole mixing matrix of a token's streams. DeepSeek-V4 has 4 streams.
MAX_STREAMS = 16


@repeats_launches
def mhc_pre(
    streams: torch.Tensor,
    projected: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    rms_eps: float = 1e-6,
    eps: float = 1e-6,
    iterations: int = 20,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The input of a DeepSeek-V4 layer from a token's n streams, and the coefficients to add its result to them.

    Manifold-constrained hyper-connections (mHC, arXiv:2512.24880). Let r be the root mean square of all elements of a
    token, and z = projected / r · scale + base, split in a (n elements), b (n elements) and a matrix C. The layer's
    input is Σ (sigmoid(aᵢ) + eps) streamᵢ, and the shares are 2 sigmoid(b). The mixture is softmax(C) + eps, normalized
    by Sinkhorn's iteration: its columns, then ``iterations`` - 1 times its rows and columns, are divided by their sums
    + eps. Computed in float32. It has no backward pass, and warns once if gradients are enabled and an input requires
    one.

    Args:
        streams: [T, n, hidden_size], bf16, fp16 or float32, contiguous; n from 1 to 16. T may be 0.
        projected: float32 [T, (2 + n) · n], the token's elements, not normalized, times the layer's projection.
        base: float32 [(2 + n) · n].
        scale: float32 [3], of a, b and C.
        rms_eps: added to the mean square.
        iterations: at least 1.
        backend: "portable" or "reference"; None selects one.

    Returns:
        shares float32 [T, n], mixture float32 [T, n, n], and the layer's input [T, hidden_size] in streams' dtype.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device.
    """
    tokens, count, width = _check_streams(streams)
    numbers, device = (2 + count) * count, streams.device
    checks.tensor("projected", projected, (tokens, numbers), (torch.float32,), device, may_be_empty=1)
    checks.contiguous(projected=projected)
    checks.tensor("base", base, (numbers,), (torch.float32,), device)
    checks.tensor("scale", scale, (3,), (torch.float32,), device)
    rms_eps, eps = checks.epsilon("rms_eps", rms_eps), checks.epsilon("eps", eps)
    iterations = checks.positive_int("iterations", iterations)
    gradients.warn_if_dropped(PRE, streams, projected, base, scale)
    backend = dispatch.select(dispatch.CallSpec(PRE, device, streams.dtype, head_dim=count), backend)
    shares, mixture = projected.new_empty(tokens, count), projected.new_empty(tokens, count, count)
    layer_input = streams.new_empty(tokens, width)
    if tokens:
        params = MhcPreParams(
            streams=streams,
            projected=projected,
            base=base,
            scale=scale,
            rms_eps=rms_eps,
            eps=eps,
            iterations=iterations,
            shares=shares,
            mixture=mixture,
            layer_input=layer_input,
        )
        _mhc_pre(params, backend)
    return shares, mixture, layer_input


@register_op(PRE, mutates=("shares", "mixture", "layer_input"))
@dispatch.implemented(PRE, portable=refusals.triton)
def _mhc_pre(params: MhcPreParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.mhc.portable import mhc_pre
    else:
        from flashlatte.ops.mhc.reference import mhc_pre

    mhc_pre(params)


@repeats_launches
def mhc_post(
    result: torch.Tensor,
    streams: torch.Tensor,
    shares: torch.Tensor,
    mixture: torch.Tensor,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """The streams after a layer: streamⱼ becomes Σᵢ mixtureᵢⱼ streamᵢ + sharesⱼ result, rounded once.

    It has no backward pass, and warns once if gradients are enabled and an input requires one.

    Args:
        result: [T, hidden_size], the layer's output; bf16, fp16 or float32, contiguous. T may be 0.
        streams: [T, n, hidden_size] before the layer, likewise.
        shares: float32 [T, n], contiguous, as returned by ``mhc_pre``.
        mixture: float32 [T, n, n], likewise.
        backend: "portable" or "reference"; None selects one.

    Returns:
        [T, n, hidden_size] in streams' dtype.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device.
    """
    tokens, count, width = _check_streams(streams)
    device = streams.device
    checks.tensor("result", result, (tokens, width), (streams.dtype,), device, may_be_empty=1)
    checks.tensor("shares", shares, (tokens, count), (torch.float32,), device, may_be_empty=1)
    checks.tensor("mixture", mixture, (tokens, count, count), (torch.float32,), device, may_be_empty=1)
    checks.contiguous(result=result, shares=shares, mixture=mixture)
    gradients.warn_if_dropped(POST, result, streams, shares, mixture)
    backend = dispatch.select(dispatch.CallSpec(POST, device, streams.dtype, head_dim=count), backend)
    out = torch.empty_like(streams)
    if tokens:
        _mhc_post(result, streams, shares, mixture, out, backend)
    return out


def _check_streams(streams: torch.Tensor) -> torch.Size:
    checks.tensor("streams", streams, ("T", "n", "hidden_size"), checks.FLOAT_DTYPES, may_be_empty=1)
    checks.contiguous(streams=streams)
    if streams.shape[1] > MAX_STREAMS:
        raise ValueError(f"streams must have at most {MAX_STREAMS} streams per token, got {streams.shape[1]}")
    return streams.shape


@register_op(POST, mutates=("out",))
@dispatch.implemented(POST, portable=refusals.triton)
def _mhc_post(
    result: torch.Tensor,
    streams: torch.Tensor,
    shares: torch.Tensor,
    mixture: torch.Tensor,
    out: torch.Tensor,
    backend: str,
) -> None:
    if backend == "portable":
        from flashlatte.ops.mhc.portable import mhc_post
    else:
        from flashlatte.ops.mhc.reference import mhc_post

    mhc_post(result, streams, shares, mixture, out)
