"""``vit_attention``: ``dense_prefill`` with the interface of vision towers."""

from __future__ import annotations

import torch

from flashlatte.ops.dense_prefill.api import dense_prefill
from flashlatte.runtime import checks


def vit_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Attention of the patches of each image to all patches of the same image; differentiable.

    Images of any sizes are packed one after another. Head dims need not be powers of two: the kernel pads 72, 80 and
    96. On Hopper the backward pass is the portable one, except for head dim 128.

    Args:
        q: [T, h, d], or [b, s, h, d], whose first two axes are flattened to one list of patches; bf16, fp16 (float32
            and float64 on the reference).
        k: same shape as q, except for its number of heads, which divides h.
        v: like k, with any head dim.
        cu_seqlens: int32 or int64 [images + 1], non-decreasing boundaries of the images. None: q has four axes, and
            each of its b rows is an image.
        max_seqlen: patches of the largest image: a number, or a one-element integer tensor, which is not read. It does
            not affect results. None means the number of patches.
        softmax_scale: above 0; d^-0.5 if None.
        out: same shape as q with v's head dim, in q's dtype, to write to; last stride 1. Must be None if gradients are
            recorded.
        backend: "hopper", "portable" or "reference"; None selects one; a named backend that cannot run the call is an
            error.

    Returns:
        A tensor of q's shape, with v's head dim, in q's dtype.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device; inconsistent arguments.
    """
    axes = checks.given("q", q).dim()
    if axes not in (3, 4):
        raise ValueError(f"q must have shape [T, h, d] or [b, s, h, d], got {list(q.shape)}")
    given = {"q": q, "k": k, "v": v}
    for name, value in given.items():
        if checks.given(name, value).dim() != axes:
            raise ValueError(f"{name} must have {axes} axes like q, got {list(value.shape)}")
    if out is not None and checks.given("out", out).dim() != axes:
        raise ValueError(f"out must have {axes} axes like q, got {list(out.shape)}")
    images, patches = (q.shape[0], q.shape[1]) if axes == 4 else (0, 0)
    if axes == 4:
        q, k, v = (value.flatten(0, 1) for value in given.values())
    if cu_seqlens is None:
        if axes == 3:
            raise ValueError("cu_seqlens must be given where q has shape [T, h, d], got None")
        cu_seqlens = torch.arange(images + 1, dtype=torch.int32, device=q.device) * patches
        longest = patches
    else:
        longest = q.shape[0]
        if isinstance(max_seqlen, torch.Tensor):
            if max_seqlen.numel() != 1 or max_seqlen.is_floating_point():
                raise ValueError(
                    f"max_seqlen must be an int or hold one integer, got {checks.dtype_names([max_seqlen.dtype])} "
                    f"{list(max_seqlen.shape)}"
                )
        elif max_seqlen is not None:
            longest = checks.positive_int("max_seqlen", max_seqlen, or_zero=True)
    target = None if out is None else out if axes == 3 else _flat(out)
    with checks.naming(cu_seqlens_q="cu_seqlens", cu_seqlens_k="cu_seqlens"):
        result, _ = dense_prefill(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            softmax_scale=softmax_scale,
            out=target,
            backend=backend,
        )
    if out is not None:
        return out
    return result.unflatten(0, (images, patches)) if axes == 4 else result


def _flat(out: torch.Tensor) -> torch.Tensor:
    """out with its first two axes flattened, without a copy."""
    try:
        return out.view(-1, *out.shape[2:])
    except RuntimeError:
        raise ValueError(f"out must have its first two axes in one piece, got strides {out.stride()}") from None
