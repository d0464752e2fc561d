"""The Hopper kernels of dense prefill, emulated on the CPU, against the reference: NaN in all rows without a visible
pair."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.marks import mostly_full

from flashlatte.ops.dense_prefill import api, reference
from flashlatte.ops.dense_prefill.reference import DensePrefillGradients, DensePrefillParams
from flashlatte.runtime import machine, ragged
from flashlatte.testing import compare
from flashlatte.testing.cases import DensePrefillCase

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="imports Gluon kernels")

CAUSAL = DensePrefillCase(2, 150, 110, 1, 1, causal=True, varlen=True)
CASES = {
    # 43 of the first request's 152 queries have no visible key, and 70 of the second one's 185 keys are visible to no
    # query.
    "window": DensePrefillCase(2, 100, 110, 1, 1, window=(40, 5), varlen=True, seed=22),
    "more queries than keys": CAUSAL,
    "more keys than queries": replace(CAUSAL, batch=1, s_q=100, s_k=300, varlen=False),
    "without a mask": replace(CAUSAL, causal=False),
    "heads of one key head": replace(CAUSAL, h_q=3, s_q=70, unowned=5),
    "128": replace(CAUSAL, head_dim=128, h_q=2, h_kv=2),
    "many requests": replace(CAUSAL, batch=6, s_q=40, s_k=60, zero_lengths=True, index_dtype=torch.int64),
    "fp16, gaps between rows": replace(CAUSAL, batch=1, h_q=2, dtype=torch.float16, strided=True),
}


@pytest.mark.parametrize("name", mostly_full(CASES, "window"))
def test_forward(emulation, name):
    params, _ = with_nan(CASES[name])
    (expected_out, expected_lse), (out, lse) = new_results(params), new_results(params)
    reference.forward(params, expected_out, expected_lse)
    # Both consumers set the values beyond a request's end to 0, and neither waits for the other.
    emulation(seed=1, finds_races=False)(api.OPERATION, "hopper", params, out, lse)
    assert not expected_out.isnan().any()
    compare.assert_close(out, expected_out, compare.DENSE_PREFILL_OUT, "out")
    compare.assert_close(lse, expected_lse, compare.DENSE_PREFILL_LSE, "lse")


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", mostly_full(CASES, "window"))
def test_backward(emulation, name, deterministic):
    params, queries = with_nan(CASES[name])
    out, lse = new_results(params)
    reference.forward(params, out, lse)
    generator = torch.Generator().manual_seed(1)
    dout = (torch.randn(out.shape, generator=generator) / 10).to(out.dtype)
    dlse = torch.randn(lse.shape, generator=generator) / 10
    for x in (out, dout, dlse):
        x[~queries] = torch.nan
    expected, results = (tuple(torch.full_like(x, torch.nan) for x in (params.q, params.k, params.v)) for _ in range(2))
    given = out, lse, dout, dlse, deterministic
    reference.backward(params, DensePrefillGradients(*given, *expected))
    emulation(seed=1)(api.BACKWARD, "hopper", params, DensePrefillGradients(*given, *results))
    for gradient, result, wanted in zip(("dq", "dk", "dv"), results, expected, strict=True):
        assert wanted.isfinite().all()
        compare.assert_close(result, wanted, compare.DENSE_PREFILL_GRADIENT, gradient)


def with_nan(case: DensePrefillCase) -> tuple[DensePrefillParams, torch.Tensor]:
    """Arguments with NaN in queries without visible keys, and in keys and values visible to no query, and the mask of
    the other queries."""
    inputs = case.inputs()
    del inputs["max_seqlen_q"]
    left, right = ragged.window_sides(inputs.pop("window"), inputs.pop("causal"))
    params = DensePrefillParams(**inputs, window_left=left, window_right=right, empty_lse=-torch.inf)
    queries, keys = (torch.zeros(x.shape[0], dtype=torch.bool) for x in (params.q, params.k))
    for own, others, visible in reference._blocks(params):
        queries[own] |= visible.any(dim=1)
        keys[others] |= visible.any(dim=0)
    params.q[~queries] = params.k[~keys] = params.v[~keys] = torch.nan
    return params, queries


def new_results(params: DensePrefillParams) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, filled with NaN."""
    tokens, heads, _ = params.q.shape
    out = torch.full((tokens, heads, params.v.shape[2]), torch.nan, dtype=params.q.dtype)
    return out, torch.full((heads, tokens), torch.nan).T
