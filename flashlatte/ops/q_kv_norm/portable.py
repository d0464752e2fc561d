"""``q_kv_norm`` in Triton: the first programs process a token's query latent each, the following ones its key."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import triton.language as tl

from flashlatte.kernels.triton.row_norm import RowNorm, row_norm, store_norm
from flashlatte.ops.q_kv_norm.reference import QKvNormParams
from flashlatte.runtime.triton_kernel import kernel

# Warps of a program per byte of an element (2 for bf16, 4 for float32), so that a thread holds the same number of
# bytes.
WARPS_PER_BYTE = 1


def q_kv_norm(params: QKvNormParams) -> None:
    q = params.q
    q_kv_norm_kernel[(2 * q.shape[0],)](
        row_norm(q, params.q_weight, params.q_out, params.eps),
        row_norm(params.kv, params.kv_weight, params.kv_out, params.eps),
        num_tokens=q.shape[0],
        num_warps=WARPS_PER_BYTE * q.element_size(),
    )


@kernel
def q_kv_norm_kernel(q: RowNorm, kv: RowNorm, num_tokens: tl.int64):
    program = tl.program_id(0).to(tl.int64)
    if program < num_tokens:
        store_norm(q, program, q.out + program * q.width, None, False)
    else:
        token = program - num_tokens
        store_norm(kv, token, kv.out + token * kv.width, None, False)
