from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_op import opcheck

from flashlatte import q_kv_norm
from flashlatte.ops.q_kv_norm import api
from flashlatte.runtime import machine

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernel).
pytestmark = [pytest.mark.interpreter] if machine.interpreting() else []


@given(
    tokens=st.integers(0, 4),
    widths=st.sampled_from([(48, 16), (1, 3), (130, 512)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    weight_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    eps=st.sampled_from([1e-6, 0.5]),
    seed=st.integers(0, 1000),
)
def test_against_float64(tokens, widths, dtype, weight_dtype, eps, seed):
    generator = torch.Generator().manual_seed(seed)
    # Both are columns of one projection's result.
    both = torch.randn(tokens, sum(widths) + 5, generator=generator).to(dtype)
    rows = both[:, : widths[0]], both[:, widths[0] : sum(widths)]
    weights = [torch.randn(width, generator=generator).to(weight_dtype) for width in widths]
    outs = q_kv_norm(*rows, weights[0], weights[1], eps, backend=BACKEND)
    for x, weight, out in zip(rows, weights, outs, strict=True):
        assert out.dtype == dtype
        assert out.is_contiguous()
        for row, result in zip(x.double().tolist(), out, strict=True):
            length = math.sqrt(math.fsum(value * value for value in row) / len(row) + eps)
            exact = torch.tensor([value / length * float(gain) for value, gain in zip(row, weight, strict=True)])
            torch.testing.assert_close(result.float(), exact, rtol=torch.finfo(dtype).eps + 1e-6, atol=1e-6)


Q, KV, Q_WEIGHT, KV_WEIGHT = torch.zeros(3, 8), torch.zeros(3, 4), torch.ones(8), torch.ones(4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": Q.int()}, TypeError, "^q must be bfloat16 or float16 or float32, got int32$"),
        ({"kv": KV.half()}, TypeError, "^kv must be float32, got float16$"),
        ({"kv": KV[:2]}, ValueError, r"^kv must have shape \[3, head_dim\]"),
        ({"q_weight": KV_WEIGHT}, ValueError, r"^q_weight must have shape \[8\]"),
        ({"kv_weight": KV_WEIGHT.half()}, TypeError, "^kv_weight must be float32, got float16$"),
        ({"eps": "1"}, TypeError, "^eps must be a number"),
        ({"eps": float("nan")}, ValueError, "^eps must be a finite number of at least 0 in float32, got nan"),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve this call of q_kv_norm: it "),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        q_kv_norm(**({"q": Q, "kv": KV, "q_weight": Q_WEIGHT, "kv_weight": KV_WEIGHT} | change))


@pytest.mark.skipif(machine.interpreting(), reason="the reference's")
def test_opcheck():
    opcheck(api, "q_kv_norm", lambda: q_kv_norm(Q, KV, Q_WEIGHT, KV_WEIGHT))
