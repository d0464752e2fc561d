import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashlatte import dense_decode
from flashlatte.runtime import dispatch
from flashlatte.runtime.dispatch import Call, Choice, Implementation

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fake_tensors_of_a_gpu_need_none():
    with FakeTensorMode():
        q, cache = (torch.empty(2, 2, 1, 576, dtype=BF16, device="cuda") for _ in range(2))
        table, lengths = (torch.empty(2, *more, dtype=torch.int32, device="cuda") for more in ((1,), ()))
        out, lse = dense_decode(q, cache, table, lengths)
    assert (out.shape, lse.shape) == ((2, 2, 1, 512), (2, 1, 2))
    assert out.device.type == "cuda"


def test_explain_tells_about_every_backend(operation):
    operation(Implementation("reference", "m:f", (F32,)), Implementation("portable", "m:f", (BF16,)))
    assert dispatch.explain(Call("toy", CPU, F32)) == [
        Choice("hopper", "has no toy in this version"),
        Choice("portable", "takes bfloat16, not float32"),
        Choice("reference", None),
    ]


@pytest.mark.parametrize(
    ("implementation", "message"),
    [
        (Implementation("", "m:f", (F32,)), "^backend must be a name of letters, digits and underscores, got ''$"),
        (Implementation("my kernel", "m:f", (F32,)), "^backend must be a name .* got 'my kernel'$"),
        (Implementation("mine", "m", (F32,)), "^target must be 'module:function', got 'm'$"),
    ],
)
def test_register_refuses_what_it_could_not_run(operation, implementation, message):
    with pytest.raises(ValueError, match=message):
        operation(implementation)


def test_a_third_party_registers_a_backend_of_its_own(operation):
    operation(Implementation("reference", "math:sqrt", (F32, BF16)), Implementation("portable", "math:exp", (BF16,)))
    dispatch.register("toy", Implementation("mine", "math:cos", (BF16,), heads=(8,)))
    assert dispatch.select(Call("toy", CPU, BF16, h_q=8)) == "mine"
    assert dispatch.select(Call("toy", CPU, BF16, h_q=9)) == "portable"
    assert dispatch.select(Call("toy", CPU, BF16, h_q=8), "reference") == "reference"
    assert dispatch.backends() == ("hopper", "portable", "reference", "mine")
    assert dispatch.implementation("toy", "mine")(0.0) == 1.0  # type: ignore[func-returns-value]
    with pytest.raises(
        ValueError, match=r"^backend='mine' cannot serve this call of toy: it takes 8 query heads, not 9"
    ):
        dispatch.select(Call("toy", CPU, BF16, h_q=9), "mine")
    with pytest.raises(ValueError, match=r"^backend must be one of mine, hopper, portable, .* or None, got 'my'"):
        dispatch.select(Call("toy", CPU, BF16), "my")
    assert next(choice.backend for choice in dispatch.explain(Call("toy", CPU, BF16, h_q=9))) == "mine"


def test_a_later_registration_takes_the_place_of_an_earlier_one(operation):
    operation(Implementation("reference", "math:sqrt", (F32,)))
    assert dispatch.implementation("toy", "reference")(4.0) == 2.0  # type: ignore[func-returns-value]
    operation(Implementation("reference", "math:exp", (F32,)))
    assert dispatch.implementation("toy", "reference")(0.0) == 1.0  # type: ignore[func-returns-value]


def test_names_of_its_own_only(operation):
    operation(Implementation("left", "m:f", (F32,), sparse=False), Implementation("right", "m:f", (F32,), sparse=True))
    assert dispatch.select(Call("toy", CPU, F32, sparse=True)) == "right"
    assert dispatch.explain(Call("toy", CPU, F32, sparse=True)) == [
        Choice("left", "is for all tokens, not for selected ones"),
        Choice("right", None),
    ]


@pytest.mark.parametrize(
    ("states", "call", "reason"),
    [
        ({"cache_formats": ("bf16", "v32")}, {"cache_format": "fp8"}, "takes caches in bf16 or v32, not fp8"),
        ({"page_multiple": 64}, {"page_size": 96}, "takes pages of a multiple of 64 tokens, not 96"),
        (
            {"head_dims": ((576, 512), (512, 512))},
            {"head_dim": 576, "head_dim_v": 128},
            "takes head dims 576 with 512 or 512 with 512, not 576 with 128",
        ),
        ({"max_head_dim": 256}, {"head_dim": 128, "head_dim_v": 512}, "takes head dims up to 256, not 512"),
        ({"heads": (64, 128)}, {"h_q": 16}, "takes 64 or 128 query heads, not 16"),
        ({"kv_heads": (1,)}, {"h_kv": 2}, "takes 1 key heads, not 2"),
        ({"aligned_rows": True}, {"rows_aligned": False}, "takes tensors whose rows begin at multiples of 16 bytes"),
        ({"sparse": True}, {"sparse": False}, "is for tokens that indices select"),
        ({"sparse": False}, {"sparse": True}, "is for all tokens, not for selected ones"),
        ({"sinks": False}, {"sinks": True}, "takes no attention sinks"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_an_implementation_states_is_what_it_serves(operation, states, call, reason):
    operation(Implementation("reference", "m:f", (F32,), **states))
    with pytest.raises(ValueError, match=f"reference {reason}$"):
        dispatch.select(Call("toy", CPU, F32, **call))
    # What a call leaves open is no reason to refuse it.
    assert dispatch.select(Call("toy", CPU, F32)) == "reference"
    fitting = {"page_size": 128, "head_dim": 576, "head_dim_v": 512, "cache_format": "bf16", "h_q": 64, "h_kv": 1}
    if "max_head_dim" not in states:
        assert dispatch.select(Call("toy", CPU, F32, **fitting)) == "reference"


def test_the_function_is_imported_when_asked_for(operation):
    operation(Implementation("reference", "math:sqrt", (F32,)))
    dispatch.implementation.cache_clear()
    assert dispatch.implementation("toy", "reference")(4.0) == 2.0  # type: ignore[func-returns-value]
    dispatch.implementation.cache_clear()


def test_every_operation_has_a_reference_for_float32_on_the_cpu():
    expected = {"dense_decode", "sparse_decode", "sparse_prefill", "merge_states", "cache_write", "cache_gather"}
    assert expected <= set(dispatch.operations())
    for name in expected:
        assert dispatch.explain(Call(name, CPU, F32, h_q=1, head_dim=576, page_size=64))[-1].refusal is None
        assert dispatch.implementation(name, "reference")


@pytest.mark.parametrize(("value", "expected"), [("on", True), ("YES", True), ("0", False)])
def test_interpreting_reads_what_triton_reads(value, expected):
    script = "from flashlatte.runtime import dispatch; print(dispatch.interpreting())"
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
