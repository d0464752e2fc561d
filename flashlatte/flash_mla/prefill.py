"""``flash_mla_sparse_fwd``: sparse prefill."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashlatte.flash_mla import positions
from flashlatte.ops.sparse_prefill import sparse_prefill
from flashlatte.runtime import checks

# The last positional arguments in the order of sgl-flash-mla, and in that of vLLM's copy.
LAST = ("use_legacy", "return_log2_lse")
LAST_IN_VLLM = ("out",)

_LOG2_E = math.log2(math.e)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *last: Any,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, Any, Any]:
    """Sparse prefill: each query token attends to its selected tokens of a contiguous latent.

    Args:
        q: [s_q, h_q, d], bf16 or fp16 (float32 on the reference), d 576 or 512.
        kv: [s_kv, 1, d] in q's dtype.
        indices: int32 or int64 [s_q, 1, topk]; values outside 0 to s_kv - 1 select nothing.
        sm_scale: softmax scale, above 0.
        d_v: width of a value, the first columns of a row of ``kv``.
        attn_sink: float32 [h_q]; out is scaled by e^lse / (e^lse + e^sink), lse is not.
        topk_length: int32 or int64 [s_q], number of indices to use.
        last: by position: ``use_legacy, return_log2_lse``, the order of sgl-flash-mla, if the first is a bool; else
            ``out``, as in vLLM's copy.
        use_legacy: unused; selects between sgl-flash-mla's kernels.
        return_log2_lse: True: max_logits and lse in base 2; False: None for both. Default: natural logarithm.
        out: optional output buffer [s_q, h_q, d_v] in q's dtype.
        backend: "hopper", "portable" or "reference"; None selects one.

    Returns:
        out [s_q, h_q, d_v] in q's dtype; max_logits and lse, natural logarithm unless ``return_log2_lse``, float32
        [s_q, h_q]. A row without valid indices: out 0, max_logits -inf, lse +inf.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device; inconsistent arguments.
    """
    if last:
        named = positions.by_name("flash_mla_sparse_fwd", last, LAST, LAST_IN_VLLM)
        use_legacy = named.get("use_legacy", use_legacy)
        return_log2_lse = named.get("return_log2_lse", return_log2_lse)
        out = named.get("out", out)
    checks.flag("use_legacy", use_legacy)
    if return_log2_lse is not None:
        checks.flag("return_log2_lse", return_log2_lse)
    out, max_logits, lse = sparse_prefill(
        q,
        kv,
        indices,
        checks.score_factor("sm_scale", sm_scale),
        d_v=d_v,
        attn_sink=attn_sink,
        topk_length=topk_length,
        out=out,
        empty_lse=math.inf,
        backend=backend,
    )
    if return_log2_lse is None:
        return out, max_logits, lse
    if not return_log2_lse:
        return out, None, None
    return out, max_logits * _LOG2_E, lse * _LOG2_E
