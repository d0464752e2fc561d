"""The e4m3 kernel of sparse prefill on Hopper: its results in the emulator, and its machine code."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.marks import mostly_full

from flashlatte import sparse_prefill
from flashlatte.runtime import machine
from flashlatte.testing import oracles
from flashlatte.testing.cases import SparsePrefillCase

pytest.importorskip("triton")

from support import attention_calls
from support import compile as support
from support.compile import SHARED_BYTES, Launch, Recorder
from support.e4m3_products import check_operands_are_of_this_step, steps_of
from support.loops import loops

from flashlatte.ops.sparse_prefill.hopper import launch as chosen
from flashlatte.ops.sparse_prefill.hopper.fp8 import launch, workspace

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="imports Gluon kernels")

CASE = SparsePrefillCase(2, 90, 16, 70)
# The number of SMs decides how many tiles a CTA processes.
CASES = {
    "one tile a CTA": (8, CASE),
    "several tiles a CTA": (2, replace(CASE, s_q=3, s_kv=300, h_q=128, topk=300, topk_lengths=True, empty_rows=0.3)),
    "without rope": (2, replace(CASE, s_q=3, h_q=64, head_dim=512, attn_sink=False, duplicates=True, strided=True)),
    "all selected, fp16": (3, replace(CASE, s_q=5, s_kv=500, h_q=96, topk=256, invalid_share=0.0, dtype=torch.float16)),
    "int64, all empty": (2, replace(CASE, s_q=3, h_q=3, empty_rows=1.0, index_dtype=torch.int64)),
}


@pytest.fixture
def emulate(emulation):
    """Runs a call of the Hopper kernel on an emulated GPU with some SMs."""

    def run(inputs: dict[str, Any], num_sms: int, seed: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        emulation(num_sms=num_sms, seed=seed)
        return sparse_prefill(**inputs, precision="fp8", backend="hopper")

    return run


@pytest.mark.parametrize("name", mostly_full(CASES, "one tile a CTA"))
@pytest.mark.parametrize(("sharpness", "seed"), [(1, 6), pytest.param(30, 7, marks=pytest.mark.full)])
def test_emulated(emulate, name: str, sharpness: float, seed: int) -> None:
    """Its error against float64 is at most a tenth larger than the reference's, plus the rounding to 16 bits. Rows of
    kv that no index selects are NaN."""
    num_sms, case = CASES[name]
    inputs = case.inputs()
    inputs["q"] = inputs["q"] * sharpness
    reference = sparse_prefill(**inputs, precision="fp8", backend="reference")
    expected, _, _ = oracles.sparse_prefill(**inputs)
    results = emulate(inputs, num_sms, seed)
    norm = expected.norm().clamp_min(1e-9)
    errors = [(x[0].double() - expected).norm() / norm for x in (results, reference)]
    assert errors[0] < 1.1 * errors[1] + 0.003
    # 14 bits of each of the 20 partial sums of a logit.
    largest = reference[1].abs().nan_to_num(posinf=0.0).max().item()
    for result, other in zip(results[1:], reference[1:], strict=True):
        torch.testing.assert_close(result, other, atol=1e-3 + 20 * 2.0**-13 * largest, rtol=1e-5)


@pytest.mark.full
def test_a_nan_stays_with_its_rows(emulate) -> None:
    """NaN in a query affects its row; in a key, the tokens that select it."""
    inputs = replace(CASE, s_q=3, h_q=3, invalid_share=0.0).inputs()
    inputs["q"][0, 1, 550] = torch.nan
    inputs["kv"].nan_to_num_(nan=0.1)
    inputs["indices"][:, 0, 0] = torch.tensor([0, 0, 89])
    inputs["indices"][:, 0, 1:].clamp_(1, 88)
    inputs["kv"][89, 0, 300] = torch.nan
    out, _, _ = emulate(inputs, 2)
    assert out.isnan().any(-1).tolist() == [[False, True, False], [False] * 3, [True] * 3]


CALLS: dict[str, dict[str, Any]] = {
    "576": {},
    "512, fp16, lengths": {"head_dim": 512, "dtype": torch.float16, "lengths": True, "index_dtype": torch.int64},
    "no sinks": {"sinks": False},
}


@pytest.fixture
def record(monkeypatch):
    recorder = Recorder(launch.sparse_prefill_fp8_kernel)
    monkeypatch.setattr(launch, "sparse_prefill_fp8_kernel", recorder)
    for kernel in ("maxima_kernel", "quantize_kernel"):
        monkeypatch.setattr(workspace, kernel, Recorder(getattr(workspace, kernel)))
    monkeypatch.setattr(machine, "num_sms", lambda _: 132)

    def run(operation: str, backend: str, params: Any, *, arch: int | None) -> list[Any]:
        chosen.sparse_prefill(params._replace(precision="fp8"))
        return []

    def record(**call: Any) -> Launch:
        recorder.launches.clear()
        attention_calls.sparse_prefill(run, "hopper", **call)
        return recorder.launches[0]

    return record


@pytest.mark.parametrize("name", mostly_full(CALLS, "576"))
def test_machine_code(record, name: str) -> None:
    code = support.compile_gluon(launch.sparse_prefill_fp8_kernel.fn, record(**CALLS[name]))
    assert code.shared <= SHARED_BYTES[90]
    products = re.findall(r"\bQGMMA\.(\S+)", code.sass)
    # Both consumers: scores of a block, in which the rope has two terms, and two blocks times half of the values.
    scores = 512 // 32 + (0 if "512" in name else 2 * 64 // 32)
    assert len(products) == 2 * (scores + 2 * 8)
    assert set(products) == {"64x64x32.F32.E4M3.E4M3"}
    # ptxas waits after every product if it lacks registers (its message C7512).
    assert code.waits <= 8
    # It reads stale registers where a loop converts numbers to e4m3 and back (docs/notes/dense-decode-fp8.md).
    assert "E4M3.UNPACK" not in code.sass
    innermost = steps_of(code.sass, scores + 2 * 8)
    assert not any(re.search(r"\b(?:STL|LDL)\b", one) for body in innermost for one in body)
    # The loader must not spill the indices that it loads ahead: it would wait for them.
    loader = min((body for body in loops(code.sass) if sum("LDGSTS" in one for one in body) >= 32), key=len)
    assert sum(bool(re.search(r"\bSTL\b", one)) for one in loader) <= 4


def test_operands_in_registers_are_of_this_step(record) -> None:
    check_operands_are_of_this_step(
        support.compile_gluon(launch.sparse_prefill_fp8_kernel.fn, record(**CALLS["576"])).sass, 36
    )


def test_one_variant_for_all_head_counts(record) -> None:
    calls = [record(heads=heads, s_q=s_q) for heads, s_q in ((2, 1), (16, 3), (126, 8), (128, 200))]
    assert len({support.variant_key(launch.sparse_prefill_fp8_kernel.fn, call) for call in calls}) == 1
    assert [call.grid for call in calls] == [(1,), (3,), (16,), (132,)]
