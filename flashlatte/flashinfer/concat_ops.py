"""``concat_mla_k``: keys of prefill from their parts."""

from __future__ import annotations

import torch

from flashlatte.flashinfer.conventions import own_backend
from flashlatte.ops.concat_mla_q import concat_mla_q
from flashlatte.runtime import checks

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


BACKENDS = ("default", "cake")


def concat_mla_k(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, *, backend: str = "default") -> None:
    """Write ``k_nope`` and ``k_rope``, which all heads share, to ``k``: ``flashlatte.concat_mla_q``.

    Args:
        k: [T, heads, nope + rope] to write to; bf16, fp16, float8_e4m3fn or float8_e5m2.
        k_nope: [T, heads, nope] in the same dtype. All strides but the last are free.
        k_rope: [T, 1, rope].
        backend: one of FlashInfer's, of which any means FlashLatte's choice; or "portable" or "reference".

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device.
    """
    own = own_backend(backend, BACKENDS)
    checks.tensor("k_nope", k_nope, ("T", "heads", "nope"), DTYPES, may_be_empty=1)
    tokens, heads, _ = k_nope.shape
    checks.tensor("k_rope", k_rope, (tokens, 1, "rope"), (k_nope.dtype,), k_nope.device, may_be_empty=1)
    checks.tensor("k", k, (tokens, heads, "nope + rope"), (k_nope.dtype,), k_nope.device, may_be_empty=1)
    rope = k_rope.expand(-1, heads, -1)
    if k.dtype == torch.float8_e5m2:
        # The operation copies bytes.
        k, k_nope, rope = (part.view(torch.float8_e4m3fn) for part in (k, k_nope, rope))
    with checks.naming(ql_nope="k_nope", q_pe="k_rope", out="k"):
        concat_mla_q(k_nope, rope, out=k, backend=own)
