import ast
import math
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashlatte import dense_decode, ops
from flashlatte.runtime import dispatch, machine, refusals
from flashlatte.runtime.dispatch import CallSpec, Choice, Implementation

CPU = torch.device("cpu")
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture
def operation(monkeypatch):
    """Define the implementations of one operation in an otherwise empty registry."""
    monkeypatch.setattr(dispatch, "_REGISTRY", {})
    return lambda *implementations: dispatch.define("toy", *implementations)


def nothing():
    raise AssertionError("an implementation that no test runs is loaded")


def takes(*dtypes):
    return lambda call: refusals.dtype(call, *dtypes)


def needs_hopper(call):
    return refusals.hopper(call)


def refuse_large_heads(call):
    return "takes at most 8 heads" if (call.h_q or 0) > 8 else None


def test_takes_the_best_that_can_serve(operation):
    operation(Implementation("portable", lambda: math.exp, takes(BF16)), Implementation("reference", lambda: math.sqrt))
    assert dispatch.select(CallSpec("toy", CPU, BF16)) == "portable"
    assert dispatch.select(CallSpec("toy", CPU, F32)) == "reference"


def test_a_named_backend_is_obeyed(operation):
    operation(
        Implementation("portable", lambda: math.exp, takes(BF16)),
        Implementation("reference", lambda: math.sqrt, takes(BF16)),
    )
    assert dispatch.select(CallSpec("toy", CPU, BF16), "reference") == "reference"


def test_a_gpu_needs_a_kernel_for_a_feature_or_a_named_reference(operation):
    operation(Implementation("portable", nothing, takes(BF16)), Implementation("reference", nothing))
    call = CallSpec("toy", CPU, F32, optional_features="speed")
    assert dispatch.select_kernel(call) == "reference"
    with machine.assuming(machine.GPU((8, 0), 108)):
        message = "^no kernel runs this call of toy with speed: .*; portable takes bfloat16, not float32. backend='ref"
        with pytest.raises(ValueError, match=message):
            dispatch.select_kernel(call)
        assert dispatch.select_kernel(call, "reference") == "reference"
        assert dispatch.select_kernel(CallSpec("toy", CPU, BF16, optional_features="speed")) == "portable"


@pytest.mark.parametrize(
    ("implementation", "reason"),
    [
        (Implementation("portable", nothing, takes(BF16)), "takes bfloat16, not float32"),
        (Implementation("portable", nothing, needs_hopper), "needs compute capability 9.0 .* on cpu"),
        (Implementation("portable", nothing, refuse_large_heads), "takes at most 8 heads"),
        (Implementation("reference", nothing, takes(F32)), "has no toy in this version"),
    ],
    ids=["dtype", "capability", "refuses", "missing"],
)
def test_a_named_backend_that_cannot_serve_is_refused_with_the_reason(operation, implementation, reason):
    operation(implementation)
    with pytest.raises(ValueError, match=f"^backend='portable' cannot serve this call of toy: it {reason}"):
        dispatch.select(CallSpec("toy", CPU, F32, h_q=9), "portable")


@pytest.mark.parametrize("backend", ["cuda", "Reference", "", 3, ["portable"]])
def test_an_unknown_backend_is_an_error(operation, backend):
    operation(Implementation("reference", nothing, takes(F32)))
    with pytest.raises(ValueError, match=r"^backend must be one of hopper, portable, reference or None, got"):
        dispatch.select(CallSpec("toy", CPU, F32), backend)


def test_none_that_can_serve_is_an_error_with_all_reasons(operation):
    operation(Implementation("reference", nothing, takes(F32)))
    with pytest.raises(
        ValueError, match=r"hopper has no toy in this version; .*; reference takes float32, not bfloat16"
    ):
        dispatch.select(CallSpec("toy", CPU, BF16))


def test_triton_serves_the_cpu_only_in_its_interpreter(operation, monkeypatch):
    operation(Implementation("portable", nothing, refusals.triton))
    monkeypatch.setattr(machine, "interpreting", lambda: False)
    with pytest.raises(ValueError, match=r"TRITON_INTERPRET=1"):
        dispatch.select(CallSpec("toy", CPU, F32), "portable")
    monkeypatch.setattr(machine, "interpreting", lambda: True)
    assert dispatch.select(CallSpec("toy", CPU, F32), "portable") == "portable"
    with pytest.raises(ValueError, match=r"not on meta"):
        dispatch.select(CallSpec("toy", torch.device("meta"), F32), "portable")


def test_triton_that_is_not_installed_is_a_reason(operation, monkeypatch):
    operation(Implementation("portable", nothing, refusals.triton))
    monkeypatch.setattr(refusals, "_TRITON_INSTALLED", False)
    with pytest.raises(ValueError, match=r"needs Triton, which is not installed"):
        dispatch.select(CallSpec("toy", CPU, F32), "portable")


def test_another_compute_capability_is_a_reason(operation, monkeypatch):
    operation(Implementation("hopper", nothing, needs_hopper))
    monkeypatch.setattr(machine, "compute_capability", lambda device: (8, 0))
    call = CallSpec("toy", torch.device("cuda", 0), F32)
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
    operation(Implementation("reference", nothing, takes(F32)), Implementation("portable", nothing, takes(BF16)))
    assert dispatch.explain(CallSpec("toy", CPU, F32)) == [
        Choice("hopper", "has no toy in this version"),
        Choice("portable", "takes bfloat16, not float32"),
        Choice("reference", None),
    ]


@pytest.mark.parametrize(
    ("implementation", "message"),
    [
        (("", nothing), "^backend must be a name of letters, digits and underscores, got ''$"),
        (("my kernel", nothing), "^backend must be a name .* got 'my kernel'$"),
        (("mine", "m:f"), "^load must be a function that returns the implementation, got 'm:f'$"),
    ],
)
def test_an_implementation_that_could_not_run_is_refused(implementation, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Implementation(*implementation)


def test_a_function_runs_its_own_implementations_and_registered_ones(operation):
    operation()
    calls = []

    @dispatch.implemented("toy", hopper=needs_hopper, portable=takes(BF16))
    def run(x: int, backend: str) -> None:
        calls.append((x, backend))

    choices = dispatch.explain(CallSpec("toy", CPU, F32))
    assert [choice.backend for choice in choices] == ["hopper", "portable", "reference"]
    assert [choice.refusal is None for choice in choices] == [False, False, True]
    assert dispatch.select(CallSpec("toy", CPU, BF16)) == "portable"
    run(1, "portable")
    dispatch.register("toy", Implementation("mine", lambda: lambda x: calls.append((x, "of another project"))))
    run(2, "mine")
    run(3, "reference")
    assert calls == [(1, "portable"), (2, "of another project"), (3, "reference")]


def test_an_operation_may_have_no_implementation_for_hopper(operation):
    operation()
    dispatch.implemented("toy", portable=takes(BF16))(lambda x, backend: None)
    with pytest.raises(ValueError, match="it has no toy in this version"):
        dispatch.select(CallSpec("toy", CPU, BF16), "hopper")


def test_a_third_party_registers_a_backend_of_its_own(operation):
    operation(Implementation("portable", lambda: math.exp, takes(BF16)), Implementation("reference", lambda: math.sqrt))
    dispatch.register("toy", Implementation("mine", lambda: math.cos, refuse_large_heads))
    assert dispatch.select(CallSpec("toy", CPU, BF16, h_q=8)) == "mine"
    assert dispatch.select(CallSpec("toy", CPU, BF16, h_q=9)) == "portable"
    assert dispatch.select(CallSpec("toy", CPU, BF16, h_q=8), "reference") == "reference"
    assert dispatch.backends() == ("hopper", "portable", "reference", "mine")
    assert dispatch.implementation("toy", "mine")(0.0) == 1.0  # type: ignore[func-returns-value]
    with pytest.raises(ValueError, match=r"^backend='mine' cannot serve this call of toy: it takes at most 8 heads"):
        dispatch.select(CallSpec("toy", CPU, BF16, h_q=9), "mine")
    with pytest.raises(ValueError, match=r"^backend must be one of mine, hopper, portable, .* or None, got 'my'"):
        dispatch.select(CallSpec("toy", CPU, BF16), "my")
    assert next(choice.backend for choice in dispatch.explain(CallSpec("toy", CPU, BF16, h_q=9))) == "mine"


def test_a_later_registration_takes_the_place_of_an_earlier_one(operation):
    operation(Implementation("reference", lambda: math.sqrt))
    assert dispatch.implementation("toy", "reference")(4.0) == 2.0  # type: ignore[func-returns-value]
    dispatch.register("toy", Implementation("reference", lambda: math.exp))
    assert dispatch.implementation("toy", "reference")(0.0) == 1.0  # type: ignore[func-returns-value]


def test_an_implementation_that_is_replaced_while_it_loads_runs_no_later_call(operation):
    def load():
        dispatch.register("toy", Implementation("reference", lambda: math.exp))  # as another thread may
        return math.sqrt

    operation(Implementation("reference", load))
    assert dispatch.implementation("toy", "reference")(4.0) == 2.0  # type: ignore[func-returns-value]
    assert dispatch.implementation("toy", "reference")(0.0) == 1.0  # type: ignore[func-returns-value]


def test_the_first_of_several_that_are_registered_is_the_best(operation):
    operation(Implementation("reference", lambda: math.sqrt))
    dispatch.register("toy", Implementation("one", nothing), Implementation("other", nothing))
    dispatch.register("toy", Implementation("latest", nothing))
    ours = [choice.backend for choice in dispatch.explain(CallSpec("toy", CPU, F32)) if choice.refusal is None]
    assert ours == ["latest", "one", "other", "reference"]


def test_registering_for_an_operation_that_does_not_exist_is_an_error(operation):
    operation(Implementation("reference", lambda: math.sqrt))
    with pytest.raises(ValueError, match=r"^operation must be one that is imported \(toy; .*\), got 'dense_decoed'$"):
        dispatch.register("dense_decoed", Implementation("mine", nothing))
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
            lambda call: refusals.head_dim_above(call, 576),
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
    ids=["page_size", "head_dims", "head_dim_above", "unaligned", "slots", "stride_bytes"],
)
def test_common_reasons(reason, call, text):
    assert reason(CallSpec("toy", CPU, F32, **call)) == text
    # Unspecified properties of a call are no reason to reject it.
    assert reason(CallSpec("toy", CPU, F32)) is None
    assert reason(CallSpec("toy", CPU, F32, page_size=128, head_dim=576, head_dim_v=512)) is None


def test_an_implementation_is_loaded_once_when_it_first_runs(operation):
    loads = []

    def load():
        loads.append(1)
        return math.sqrt

    operation(Implementation("reference", load))
    dispatch.select(CallSpec("toy", CPU, F32))
    assert not loads
    assert [dispatch.implementation("toy", "reference")(4.0) for _ in range(2)] == [2.0, 2.0]
    assert len(loads) == 1


def test_every_operation_has_a_reference_for_float32_on_the_cpu():
    ops.load()
    expected = {"dense_decode", "sparse_decode", "sparse_prefill", "merge_states", "cache_write", "cache_gather"}
    assert expected <= set(dispatch.operations())
    for name in dispatch.operations():
        assert dispatch.explain(CallSpec(name, CPU, F32, h_q=1, head_dim=576, page_size=64))[-1].refusal is None
        assert dispatch.implementation(name, "reference")


def test_every_implementation_exists():
    """The functions of operations import an implementation when they run it."""
    for path in Path(ops.__path__[0]).glob("*/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(ops.__name__):
                exec(ast.unparse(node))


@pytest.mark.parametrize(("value", "expected"), [("on", True), ("YES", True), ("0", False)])
def test_interpreting_reads_tritons_variable(value, expected, monkeypatch):
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
