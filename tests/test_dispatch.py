import os
import subprocess
import sys

import pytest
import torch

from flashlatte import dispatch
from flashlatte.dispatch import Call, Choice, Implementation

CPU = torch.device("cpu")
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture
def operation(monkeypatch):
    """Register implementations of one operation, in a registry that holds nothing else."""
    monkeypatch.setattr(dispatch, "_REGISTRY", {})

    def register(*implementations):
        dispatch.register("toy", *implementations)

    return register


def refuse_large_heads(call):
    return "takes at most 8 heads" if call.h_q > 8 else None


def test_takes_the_best_that_can_serve(operation):
    operation(Implementation("reference", "math:sqrt", (F32, BF16)), Implementation("portable", "math:exp", (BF16,)))
    assert dispatch.select(Call("toy", CPU, BF16)) == "portable"
    assert dispatch.select(Call("toy", CPU, F32)) == "reference"


def test_a_named_backend_is_obeyed(operation):
    operation(Implementation("portable", "math:exp", (BF16,)), Implementation("reference", "math:sqrt", (BF16,)))
    assert dispatch.select(Call("toy", CPU, BF16), "reference") == "reference"


@pytest.mark.parametrize(
    ("implementation", "reason"),
    [
        (Implementation("portable", "m:f", (BF16,)), "takes bfloat16, not float32"),
        (Implementation("portable", "m:f", (F32,), capability=(9, 0)), "needs compute capability 9.0 .* on cpu"),
        (Implementation("portable", "m:f", (F32,), refuses=refuse_large_heads), "takes at most 8 heads"),
        (Implementation("reference", "m:f", (F32,)), "has no toy in this version"),
    ],
    ids=["dtype", "capability", "refuses", "missing"],
)
def test_a_named_backend_that_cannot_serve_is_refused_with_the_reason(operation, implementation, reason):
    operation(implementation)
    with pytest.raises(ValueError, match=f"^backend='portable' cannot serve this call of toy: it {reason}"):
        dispatch.select(Call("toy", CPU, F32, h_q=9), "portable")


@pytest.mark.parametrize("backend", ["cuda", "Reference", ""])
def test_an_unknown_backend_is_an_error(operation, backend):
    operation(Implementation("reference", "m:f", (F32,)))
    with pytest.raises(ValueError, match=r"^backend must be one of hopper, portable, reference or None, got"):
        dispatch.select(Call("toy", CPU, F32), backend)


def test_none_that_can_serve_is_an_error_with_all_reasons(operation):
    operation(Implementation("reference", "m:f", (F32,)))
    with pytest.raises(
        ValueError, match=r"hopper has no toy in this version; .*; reference takes float32, not bfloat16"
    ):
        dispatch.select(Call("toy", CPU, BF16))


def test_triton_serves_the_cpu_only_in_its_interpreter(operation, monkeypatch):
    operation(Implementation("portable", "m:f", (F32,), needs_triton=True))
    monkeypatch.setattr(dispatch, "interpreting", lambda: False)
    with pytest.raises(ValueError, match=r"TRITON_INTERPRET=1"):
        dispatch.select(Call("toy", CPU, F32), "portable")
    monkeypatch.setattr(dispatch, "interpreting", lambda: True)
    assert dispatch.select(Call("toy", CPU, F32), "portable") == "portable"
    with pytest.raises(ValueError, match=r"not on meta"):
        dispatch.select(Call("toy", torch.device("meta"), F32), "portable")


def test_triton_that_is_not_installed_is_a_reason(operation, monkeypatch):
    operation(Implementation("portable", "m:f", (F32,), needs_triton=True))
    monkeypatch.setattr(dispatch, "_TRITON_INSTALLED", False)
    with pytest.raises(ValueError, match=r"needs Triton, which is not installed"):
        dispatch.select(Call("toy", CPU, F32), "portable")


def test_another_compute_capability_is_a_reason(operation, monkeypatch):
    operation(Implementation("hopper", "m:f", (F32,), capability=(9, 0)))
    monkeypatch.setattr(dispatch, "compute_capability", lambda device: (8, 0))
    call = Call("toy", torch.device("cuda", 0), F32)
    with pytest.raises(ValueError, match=r"needs compute capability 9.0, and cuda:0 has 8.0"):
        dispatch.select(call, "hopper")
    monkeypatch.setattr(dispatch, "compute_capability", lambda device: (9, 0))
    assert dispatch.select(call) == "hopper"


def test_explain_tells_about_every_backend(operation):
    operation(Implementation("reference", "m:f", (F32,)), Implementation("portable", "m:f", (BF16,)))
    assert dispatch.explain(Call("toy", CPU, F32)) == [
        Choice("hopper", "has no toy in this version"),
        Choice("portable", "takes bfloat16, not float32"),
        Choice("reference", None),
    ]


def test_register_refuses_an_unknown_backend(operation):
    with pytest.raises(ValueError, match=r"^backend must be one of hopper, portable, reference, got 'cuda'$"):
        operation(Implementation("cuda", "m:f", (F32,)))


def test_the_function_is_imported_when_asked_for(operation):
    operation(Implementation("reference", "math:sqrt", (F32,)))
    dispatch.implementation.cache_clear()
    assert dispatch.implementation("toy", "reference")(4.0) == 2.0  # type: ignore[func-returns-value]
    dispatch.implementation.cache_clear()


def test_every_operation_has_a_reference_for_float32_on_the_cpu():
    expected = {"dense_decode", "sparse_decode", "sparse_prefill", "merge_states", "kv_cache.write", "kv_cache.gather"}
    assert expected <= set(dispatch.operations())
    for name in expected:
        assert dispatch.explain(Call(name, CPU, F32, h_q=1, head_dim=576, page_size=64))[-1].refusal is None
        assert dispatch.implementation(name, "reference")


@pytest.mark.parametrize(("value", "expected"), [("on", True), ("YES", True), ("0", False)])
def test_interpreting_reads_what_triton_reads(value, expected):
    script = "from flashlatte import dispatch; print(dispatch.interpreting())"
    environment = os.environ | {"TRITON_INTERPRET": value}
    printed = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == str(expected)


def test_the_reference_needs_no_triton():
    script = """
import sys
sys.modules["triton"] = None
import torch, flashlatte
q, cache = torch.ones(1, 1, 1, 8), torch.ones(1, 4, 1, 8)
index = torch.zeros(1, 1, dtype=torch.int32)
out, _ = flashlatte.dense_decode(q, cache, index, torch.tensor([3]), head_dim_v=4, backend="reference")
torch.testing.assert_close(out, torch.ones_like(out))
"""
    subprocess.run([sys.executable, "-c", script], check=True)
