import runpy
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashlatte import dense_decode, ops
from flashlatte.runtime import dispatch, machine, refusals
from flashlatte.runtime.dispatch import Call, Choice, Implementation

CPU = torch.device("cpu")
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture
def operation(monkeypatch):
    """Define the implementations of one operation, in a registry that holds nothing else."""
    monkeypatch.setattr(dispatch, "_REGISTRY", {})
    return lambda *implementations: dispatch.define("toy", *implementations)


def takes(*dtypes):
    return lambda call: refusals.dtype(call, *dtypes)


def needs_hopper(call):
    return refusals.capability(call, 9, 0)


def refuse_large_heads(call):
    return "takes at most 8 heads" if (call.h_q or 0) > 8 else None


def test_takes_the_best_that_can_serve(operation):
    operation(Implementation("portable", "math:exp", takes(BF16)), Implementation("reference", "math:sqrt"))
    assert dispatch.select(Call("toy", CPU, BF16)) == "portable"
    assert dispatch.select(Call("toy", CPU, F32)) == "reference"


def test_a_named_backend_is_obeyed(operation):
    operation(
        Implementation("portable", "math:exp", takes(BF16)), Implementation("reference", "math:sqrt", takes(BF16))
    )
    assert dispatch.select(Call("toy", CPU, BF16), "reference") == "reference"


@pytest.mark.parametrize(
    ("implementation", "reason"),
    [
        (Implementation("portable", "m:f", takes(BF16)), "takes bfloat16, not float32"),
        (Implementation("portable", "m:f", needs_hopper), "needs compute capability 9.0 .* on cpu"),
        (Implementation("portable", "m:f", refuse_large_heads), "takes at most 8 heads"),
        (Implementation("reference", "m:f", takes(F32)), "has no toy in this version"),
    ],
    ids=["dtype", "capability", "refuses", "missing"],
)
def test_a_named_backend_that_cannot_serve_is_refused_with_the_reason(operation, implementation, reason):
    operation(implementation)
    with pytest.raises(ValueError, match=f"^backend='portable' cannot serve this call of toy: it {reason}"):
        dispatch.select(Call("toy", CPU, F32, h_q=9), "portable")


@pytest.mark.parametrize("backend", ["cuda", "Reference", "", 3, ["portable"]])
def test_an_unknown_backend_is_an_error(operation, backend):
    operation(Implementation("reference", "m:f", takes(F32)))
    with pytest.raises(ValueError, match=r"^backend must be one of hopper, portable, reference or None, got"):
        dispatch.select(Call("toy", CPU, F32), backend)


def test_none_that_can_serve_is_an_error_with_all_reasons(operation):
    operation(Implementation("reference", "m:f", takes(F32)))
    with pytest.raises(
        ValueError, match=r"hopper has no toy in this version; .*; reference takes float32, not bfloat16"
    ):
        dispatch.select(Call("toy", CPU, BF16))


def test_triton_serves_the_cpu_only_in_its_interpreter(operation, monkeypatch):
    operation(Implementation("portable", "m:f", refusals.triton))
    monkeypatch.setattr(machine, "interpreting", lambda: False)
    with pytest.raises(ValueError, match=r"TRITON_INTERPRET=1"):
        dispatch.select(Call("toy", CPU, F32), "portable")
    monkeypatch.setattr(machine, "interpreting", lambda: True)
    assert dispatch.select(Call("toy", CPU, F32), "portable") == "portable"
    with pytest.raises(ValueError, match=r"not on meta"):
        dispatch.select(Call("toy", torch.device("meta"), F32), "portable")


def test_triton_that_is_not_installed_is_a_reason(operation, monkeypatch):
    operation(Implementation("portable", "m:f", refusals.triton))
    monkeypatch.setattr(refusals, "_TRITON_INSTALLED", False)
    with pytest.raises(ValueError, match=r"needs Triton, which is not installed"):
        dispatch.select(Call("toy", CPU, F32), "portable")


def test_another_compute_capability_is_a_reason(operation, monkeypatch):
    operation(Implementation("hopper", "m:f", needs_hopper))
    monkeypatch.setattr(machine, "compute_capability", lambda device: (8, 0))
    call = Call("toy", torch.device("cuda", 0), F32)
    with pytest.raises(ValueError, match=r"needs compute capability 9.0, and cuda:0 has 8.0"):
        dispatch.select(call, "hopper")
    monkeypatch.setattr(machine, "compute_capability", lambda device: (9, 0))
    assert dispatch.select(call) == "hopper"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fake_tensors_of_a_gpu_need_none():
    with FakeTensorMode():
        q, cache = (torch.empty(2, 2, 1, 576, dtype=BF16, device="cuda") for _ in range(2))
        table, lengths = (torch.empty(2, *more, dtype=torch.int32, device="cuda") for more in ((1,), ()))
        out, lse = dense_decode(q, cache, table, lengths)
    assert (out.shape, lse.shape) == ((2, 2, 1, 512), (2, 1, 2))
    assert out.device.type == "cuda"


def test_explain_tells_about_every_backend(operation):
    operation(Implementation("reference", "m:f", takes(F32)), Implementation("portable", "m:f", takes(BF16)))
    assert dispatch.explain(Call("toy", CPU, F32)) == [
        Choice("hopper", "has no toy in this version"),
        Choice("portable", "takes bfloat16, not float32"),
        Choice("reference", None),
    ]


@pytest.mark.parametrize(
    ("implementation", "message"),
    [
        (("", "m:f"), "^backend must be a name of letters, digits and underscores, got ''$"),
        (("my kernel", "m:f"), "^backend must be a name .* got 'my kernel'$"),
        (("mine", "m"), "^target must be 'module:function', got 'm'$"),
    ],
)
def test_an_implementation_that_could_not_run_is_refused(implementation, message):
    with pytest.raises(ValueError, match=message):
        Implementation(*implementation)


def test_a_third_party_registers_a_backend_of_its_own(operation):
    operation(Implementation("portable", "math:exp", takes(BF16)), Implementation("reference", "math:sqrt"))
    dispatch.register("toy", Implementation("mine", "math:cos", refuse_large_heads))
    assert dispatch.select(Call("toy", CPU, BF16, h_q=8)) == "mine"
    assert dispatch.select(Call("toy", CPU, BF16, h_q=9)) == "portable"
    assert dispatch.select(Call("toy", CPU, BF16, h_q=8), "reference") == "reference"
    assert dispatch.backends() == ("hopper", "portable", "reference", "mine")
    assert dispatch.implementation("toy", "mine")(0.0) == 1.0  # type: ignore[func-returns-value]
    with pytest.raises(ValueError, match=r"^backend='mine' cannot serve this call of toy: it takes at most 8 heads"):
        dispatch.select(Call("toy", CPU, BF16, h_q=9), "mine")
    with pytest.raises(ValueError, match=r"^backend must be one of mine, hopper, portable, .* or None, got 'my'"):
        dispatch.select(Call("toy", CPU, BF16), "my")
    assert next(choice.backend for choice in dispatch.explain(Call("toy", CPU, BF16, h_q=9))) == "mine"


def test_a_later_registration_takes_the_place_of_an_earlier_one(operation):
    operation(Implementation("reference", "math:sqrt"))
    assert dispatch.implementation("toy", "reference")(4.0) == 2.0  # type: ignore[func-returns-value]
    dispatch.register("toy", Implementation("reference", "math:exp"))
    assert dispatch.implementation("toy", "reference")(0.0) == 1.0  # type: ignore[func-returns-value]


def test_the_first_of_several_that_are_registered_is_the_best(operation):
    operation(Implementation("reference", "math:sqrt"))
    dispatch.register("toy", Implementation("one", "m:f"), Implementation("other", "m:f"))
    dispatch.register("toy", Implementation("latest", "m:f"))
    ours = [choice.backend for choice in dispatch.explain(Call("toy", CPU, F32)) if choice.refusal is None]
    assert ours == ["latest", "one", "other", "reference"]


def test_registering_for_an_operation_that_does_not_exist_is_an_error(operation):
    operation(Implementation("reference", "math:sqrt"))
    with pytest.raises(ValueError, match=r"^operation must be one that is imported \(toy; .*\), got 'dense_decoed'$"):
        dispatch.register("dense_decoed", Implementation("mine", "m:f"))
    assert dispatch.operations() == ("toy",)


@pytest.mark.parametrize(
    ("reason", "call", "text"),
    [
        (
            lambda call: refusals.page_size(call, 64),
            {"page_size": 96},
            "takes pages of a multiple of 64 tokens, not 96",
        ),
        (
            lambda call: refusals.head_dims(call, (576, 512), (512, 512)),
            {"head_dim": 576, "head_dim_v": 128},
            "takes head dims 576 with 512 or 512 with 512, not 576 with 128",
        ),
        (
            lambda call: refusals.too_wide(call, 576),
            {"head_dim": 128, "head_dim_v": 1024},
            "takes head dims up to 576, not 1024",
        ),
        (refusals.unaligned, {"rows_aligned": False}, "takes tensors whose rows begin at multiples of 16 bytes"),
        (refusals.cache_size, {"slots": 2**31}, "takes caches of less than 2147483648 tokens, not 2147483648"),
        (
            refusals.cache_size,
            {"slots": 9, "stride_bytes": 2**32},
            "takes caches whose pages and tokens are less than 2147483648 bytes apart, not 4294967296",
        ),
    ],
    ids=["page_size", "head_dims", "too_wide", "unaligned", "slots", "stride_bytes"],
)
def test_common_reasons(reason, call, text):
    assert reason(Call("toy", CPU, F32, **call)) == text
    # What a call leaves open is no reason to refuse it.
    assert reason(Call("toy", CPU, F32)) is None
    assert reason(Call("toy", CPU, F32, page_size=128, head_dim=576, head_dim_v=512)) is None


def test_the_function_is_imported_when_asked_for(operation):
    operation(Implementation("reference", "math:sqrt"))
    dispatch.implementation.cache_clear()
    assert dispatch.implementation("toy", "reference")(4.0) == 2.0  # type: ignore[func-returns-value]
    dispatch.implementation.cache_clear()


def test_every_operation_has_a_reference_for_float32_on_the_cpu():
    ops.load()
    expected = {"dense_decode", "sparse_decode", "sparse_prefill", "merge_states", "cache_write", "cache_gather"}
    assert expected <= set(dispatch.operations())
    for name in dispatch.operations():
        assert dispatch.explain(Call(name, CPU, F32, h_q=1, head_dim=576, page_size=64))[-1].refusal is None
        assert dispatch.implementation(name, "reference")


@pytest.mark.parametrize(("value", "expected"), [("on", True), ("YES", True), ("0", False)])
def test_interpreting_reads_what_triton_reads(value, expected, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert runpy.run_path(machine.__file__)["interpreting"]() is expected


@pytest.mark.full
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
