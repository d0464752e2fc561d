"""The Hopper kernels of dense prefill's backward pass, emulated on the CPU, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.marks import mostly_full

from flashlatte.ops.dense_prefill import api, reference
from flashlatte.ops.dense_prefill.params import DensePrefillParams
from flashlatte.runtime import machine, ragged
from flashlatte.testing import compare
from flashlatte.testing.cases import DensePrefillCase

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="imports Gluon kernels")

CAUSAL = DensePrefillCase(2, 150, 110, 1, 1, causal=True, varlen=True)
CASES = {
    # 43 of the first request's 152 queries see no key, and no query sees 70 of the second one's 185 keys.
    "window": DensePrefillCase(2, 100, 110, 1, 1, window=(40, 5), varlen=True, seed=22),
    "more queries than keys": CAUSAL,
    "more keys than queries": replace(CAUSAL, batch=1, s_q=100, s_k=300, varlen=False),
    "without a mask": replace(CAUSAL, causal=False),
    "heads of one key head": replace(CAUSAL, h_q=3, s_q=70, unowned=5),
    "128": replace(CAUSAL, head_dim=128, h_q=2, h_kv=2),
    "many requests": replace(CAUSAL, batch=6, s_q=40, s_k=60, zero_lengths=True, index_dtype=torch.int64),
    "fp16, gaps between rows": replace(CAUSAL, batch=1, h_q=2, dtype=torch.float16, strided=True),
}


@pytest.fixture
def emulate(monkeypatch):
    """Calls implementations on a CPU that emulates a GPU. Fresh tensors hold NaN."""
    from support.emulator.emulated import Emulation

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield Emulation(monkeypatch, seed=1)
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(
    "deterministic", [False, pytest.param(True, marks=pytest.mark.full)], ids=["", "deterministic"]
)
@pytest.mark.parametrize("name", mostly_full(CASES, "window", "128"))
def test_gradients_with_nan_in_all_rows_without_a_visible_pair(emulate, name, deterministic):
    inputs = CASES[name].inputs()
    left, right = ragged.window_sides(inputs.pop("window"), inputs.pop("causal"))
    params = DensePrefillParams(**inputs, window_left=left, window_right=right, empty_lse=-torch.inf)
    queries, keys = rows_with_a_visible_pair(params)
    for x, in_use in ((params.q, queries), (params.k, keys), (params.v, keys)):
        x[~in_use] = torch.nan
    tokens, heads, _ = params.q.shape
    generator = torch.Generator().manual_seed(1)
    out, lse = torch.empty(tokens, heads, 128, dtype=params.q.dtype), torch.empty(heads, tokens).T
    reference.forward(params, out, lse)
    dout = (torch.randn(out.shape, generator=generator) / 10).to(out.dtype)
    dlse = torch.randn(lse.shape, generator=generator) / 10
    for x in (out, dout, dlse):
        x[~queries] = torch.nan
    expected, results = (tuple(torch.full_like(x, torch.nan) for x in (params.q, params.k, params.v)) for _ in range(2))
    reference.backward(params, out, lse, dout, dlse, deterministic, *expected)
    emulate(api.BACKWARD, "hopper", params, out, lse, dout, dlse, deterministic, *results)
    for gradient, result, wanted in zip(("dq", "dk", "dv"), results, expected, strict=True):
        assert wanted.isfinite().all()
        compare.assert_close(result, wanted, compare.DENSE_PREFILL_GRADIENT, gradient)


def rows_with_a_visible_pair(params: DensePrefillParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of the queries that see a key, and of the keys that a query sees."""
    queries, keys = (torch.zeros(x.shape[0], dtype=torch.bool) for x in (params.q, params.k))
    for own, others, visible in reference._blocks(params):
        queries[own] |= visible.any(dim=1)
        keys[others] |= visible.any(dim=0)
    return queries, keys
