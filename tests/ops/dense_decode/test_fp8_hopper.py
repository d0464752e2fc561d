"""The e4m3 kernel of dense decode on Hopper: its results in the emulator, and its machine code."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.marks import mostly_full

from flashlatte import dense_decode
from flashlatte.runtime import machine
from flashlatte.testing import oracles
from flashlatte.testing.cases import DenseDecodeCase

pytest.importorskip("triton")

from support import compile as support
from support.compile import SHARED_BYTES, Launch, Recorder
from support.e4m3_products import check_operands_are_of_this_step, steps_of
from support.hopper_dense_decode import decode

from flashlatte.ops.dense_decode.hopper import launch
from flashlatte.split_kv import combine, fp24_combine

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="imports Gluon kernels")

E4M3 = torch.float8_e4m3fn
CASE = DenseDecodeCase(1, 1, 100, 16, cache_dtype=E4M3)
# The number of SMs decides how the keys are split.
CASES = {
    "one request": (8, CASE),
    "ranges": (16, replace(CASE, batch=3, s_k=600, h_q=128, varlen=True)),
    "pages of 16, causal, fp16": (
        8,
        replace(CASE, batch=2, s_q=2, s_k=500, h_q=64, varlen=True, causal=True, page_size=16, dtype=torch.float16),
    ),
    "empty requests without rope": (
        8,
        replace(CASE, batch=4, s_k=300, h_q=32, varlen=True, zero_lengths=True, head_dim=512),
    ),
    "several requests a CTA, gaps between rows": (2, replace(CASE, batch=3, s_k=700, h_q=3, varlen=True, strided=True)),
    "kv heads": (8, replace(CASE, batch=2, h_q=6, h_kv=2, page_size=128)),
}


@pytest.fixture
def emulate(emulation):
    """Runs a call of the Hopper kernel on an emulated GPU with some SMs."""

    def run(inputs: dict[str, Any], num_sms: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        emulation(num_sms=num_sms, seed=6)
        return dense_decode(**inputs, precision="fp8", backend="hopper", **options)

    return run


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("sharpness", "batch_invariant"), [(1, False), (40, True)])
def test_emulated(emulate, name: str, sharpness: float, batch_invariant: bool) -> None:
    """Its error against float64 is at most a tenth larger than the reference's, plus the rounding to 16 bits."""
    num_sms, case = CASES[name]
    inputs = case.inputs()
    inputs["q"] = inputs["q"] * sharpness
    reference = dense_decode(**inputs, precision="fp8", backend="reference")
    expected, _ = oracles.dense_decode(**inputs)
    out, lse = emulate(inputs, num_sms, batch_invariant=batch_invariant)
    errors = [(x.double() - expected).norm() / expected.norm() for x in (out, reference[0])]
    assert errors[0] < 1.1 * errors[1] + 0.003
    torch.testing.assert_close(lse, reference[1], atol=1e-3, rtol=0)


@pytest.mark.full
def test_batch_invariance_bounds_the_loss_of_truncated_sums(emulate) -> None:
    """Values with a mean lose up to 2⁻¹⁷ with each key that a CTA sums."""
    inputs = replace(CASE, s_k=2048, h_q=4).inputs()
    keys = inputs["k_cache"].float()
    means = keys.nan_to_num().std() * torch.randn(576, generator=torch.Generator().manual_seed(0))
    inputs["k_cache"] = (keys + means).to(E4M3)
    expected, _ = oracles.dense_decode(**inputs)
    errors = {
        batch_invariant: (emulate(inputs, 1, batch_invariant=batch_invariant)[0].double() - expected).norm()
        / expected.norm()
        for batch_invariant in (False, True)
    }
    assert 0.01 < errors[False] < 2048 * 2.0**-16
    assert errors[True] < 0.6 * errors[False]


@pytest.mark.full
def test_a_nan_stays_with_its_request(emulate) -> None:
    """NaN in a query affects its row; in a visible key, its request. Rows after the last key are NaN in each case."""
    inputs = replace(CASE, batch=3, s_k=70, h_q=3).inputs()
    inputs["q"] = inputs["q"].clone()
    inputs["q"][0, 0, 1, 550] = torch.nan
    inputs["k_cache"].view(torch.uint8)[int(inputs["block_table"][2, 1]), 2, 0, 300] = 0x7F
    out, _ = emulate(inputs, 4)
    assert out.isnan().any(-1)[:, 0].tolist() == [[False, True, False], [False] * 3, [True] * 3]


@pytest.mark.full
def test_zero_queries_over_tiny_keys(emulate) -> None:
    """The product of both scales is 0 in float32."""
    inputs: dict[str, Any] = replace(CASE, s_k=70, h_q=3).inputs() | {"k_scale": 1e-13}
    inputs["q"] = torch.zeros_like(inputs["q"])
    expected = dense_decode(**inputs, precision="fp8", backend="reference")
    for result, reference in zip(emulate(inputs, 4), expected, strict=True):
        torch.testing.assert_close(result, reference, atol=1e-5, rtol=0.03)


CALLS: dict[str, dict[str, Any]] = {
    "many requests": {"batch": 128},
    "few requests": {"batch": 4},
    "no rope, pages of 16": {"batch": 128, "head_dim": 512, "page_size": 16},
    "batch invariant, misaligned out": {"batch_invariant": True, "out_pad": 1, "dtype": torch.float16},
}


@pytest.fixture
def record(monkeypatch):
    recorder = Recorder(launch.dense_decode_kernel)
    monkeypatch.setattr(launch, "dense_decode_kernel", recorder)
    monkeypatch.setattr(launch, "clear_kernel", Recorder(launch.clear_kernel))
    monkeypatch.setattr(fp24_combine, "combine_fp24_kernel", Recorder(fp24_combine.combine_fp24_kernel))
    monkeypatch.setattr(combine, "combine_kernel", Recorder(combine.combine_kernel))
    monkeypatch.setattr(machine, "num_sms", lambda _: 132)

    def record(**call: Any) -> Launch:
        recorder.launches.clear()
        decode(**{"cache_dtype": E4M3, "precision": "fp8"} | call)
        return recorder.launches[0]

    return record


@pytest.mark.parametrize("name", mostly_full(CALLS, "many requests"))
def test_machine_code(record, name: str) -> None:
    launched = record(**CALLS[name])
    assert launched.arguments["CONFIG"].fp8
    code = support.compile_gluon(launch.dense_decode_kernel.fn, launched)
    assert code.shared <= SHARED_BYTES[90]
    products = re.findall(r"\bQGMMA\.(\S+)", code.sass)
    # Both consumers: scores of a block, in which the rope has two terms, and two blocks times half of the values.
    scores = 512 // 32 + (0 if "no rope" in name else 2 * 64 // 32)
    assert len(products) == 2 * (scores + 2 * 8)
    assert set(products) == {"64x64x32.F32.E4M3.E4M3"}
    # ptxas waits after every product if it lacks registers (its message C7512).
    assert code.waits <= 8
    # It reads stale registers where a loop converts numbers to e4m3 and back (docs/notes/dense-decode-fp8.md).
    assert "E4M3.UNPACK" not in code.sass
    innermost = steps_of(code.sass, scores + 2 * 8)
    # Nothing spills. Triton 3.7 and 3.8 reload up to two addresses.
    for body in innermost:
        assert not any(re.search(r"\bSTL\b", one) for one in body)
        assert sum(bool(re.search(r"\bLDL\b", one)) for one in body) <= 2


def test_operands_in_registers_are_of_this_step(record) -> None:
    code = support.compile_gluon(launch.dense_decode_kernel.fn, record(**CALLS["many requests"]))
    check_operands_are_of_this_step(code.sass, 36)


def test_plan(record) -> None:
    """The e4m3 kernel supports any number of rows; the common combine kernel adds its partial outputs."""
    for call in ({"heads": 1}, {"batch": 128}, {"batch": 1, "columns": 2048}, {"batch_invariant": True}):
        arguments = record(**call).arguments
        config = arguments["CONFIG"]
        assert (config.fp8, config.few_rows, config.stream_k, config.fp24_partials) == (True, False, False, False)
        assert arguments["descriptors_half"].block_shape == [1, 64, 1, 256]
        assert arguments["descriptors_rope"].block_shape == [1, 64, 1, 32]
    assert record(precision=None).arguments["CONFIG"].fp8 is False


def test_one_variant_for_all_head_counts(record) -> None:
    calls = [record(heads=heads, batch=128) for heads in (2, 16, 126, 128)]
    assert len({support.variant_key(launch.dense_decode_kernel.fn, call) for call in calls}) == 1
