"""Queries in two tensors, ``q`` and ``q_rope``, give bitwise the results of one tensor with both."""

# Keyword arguments are built in dicts of mixed values.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.launches import launches
from support.recording import Recording
from support.torch_op import assert_compiles, opcheck

from flashlatte import sparse_decode, sparse_prefill
from flashlatte.ops.sparse_decode import api as decode_api
from flashlatte.ops.sparse_prefill import api as prefill_api
from flashlatte.runtime import gradients, machine, query_parts
from flashlatte.testing.cases import SparseDecodeCase, SparsePrefillCase

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (references) and with it (kernels).
pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")][: machine.interpreting()]

DECODE = SparseDecodeCase(2, 3, 30, 4, 9, "bf16", head_dim=48, head_dim_v=32, page_size=7, topk_lengths="token")
V32 = replace(DECODE, cache_format="v32", head_dim=None, head_dim_v=512)
PREFILL = SparsePrefillCase(3, 30, 4, 9, head_dim=48, d_v=32, topk_lengths=True)
CASES: dict[str, tuple[Callable[..., Any], SparseDecodeCase | SparsePrefillCase, int]] = {
    "decode": (sparse_decode, DECODE, 16),
    # The rotated part is not all that follows the values: kernels take the parts joined.
    "decode, more rope": (sparse_decode, DECODE, 20),
    "decode, v32": (sparse_decode, V32, 64),
    "decode, model1": (sparse_decode, replace(V32, cache_format="model1"), 64),
    "decode, fp16": (sparse_decode, replace(DECODE, cache_format="fp16", dtype=torch.float16), 16),
    "prefill": (sparse_prefill, PREFILL, 16),
    "prefill, less rope": (sparse_prefill, PREFILL, 8),
    "prefill, odd sizes": (sparse_prefill, replace(PREFILL, head_dim=37, d_v=20, h_q=3), 17),
}


def joined(arguments: dict[str, Any]) -> dict[str, Any]:
    rest = dict(arguments)
    return rest | {"q": torch.cat((rest["q"], rest.pop("q_rope")), dim=-1)} | {"q_rope": None}


def check(function: Callable[..., Any], arguments: dict[str, Any], **more: Any) -> None:
    results = function(**arguments, **more)
    for found, expected in zip(results, function(**joined(arguments), **more), strict=True):
        assert not found.isnan().any()
        assert found.equal(expected)
        assert found.stride() == expected.stride()


@pytest.mark.parametrize("name", CASES)
def test_as_layers_compute_them(name: str) -> None:
    function, case, rope = CASES[name]
    check(function, replace(case, rope=rope).inputs(), backend=BACKEND)


@given(
    name=st.sampled_from(["decode", "prefill"]),
    rows=st.permutations(range(3)),
    gaps=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    first=st.integers(0, 9),
)
def test_any_strides(name: str, rows: list[int], gaps: tuple[int, int], first: int) -> None:
    """Parts with permuted axes, gaps between rows, and any alignment; the rotated part may be a view of q's memory."""
    function, case, rope = CASES[name]
    arguments = case.inputs()
    q = arguments["q"]
    axes = [axis for axis in rows if axis < q.dim() - 1]
    parts = []
    for part, gap in zip(q.split((q.shape[-1] - rope, rope), dim=-1), gaps, strict=True):
        outer = part.permute(*axes, -1)
        storage = torch.full((*outer.shape[:-1], first + outer.shape[-1] + gap), torch.nan, dtype=q.dtype)
        view = storage[..., first : first + outer.shape[-1]]
        view.copy_(outer)
        parts.append(view.permute(*(axes.index(axis) for axis in range(len(axes))), -1))
    check(function, arguments | {"q": parts[0], "q_rope": parts[1]}, backend=BACKEND)
    views = {"q": q[..., : q.shape[-1] - rope], "q_rope": q[..., q.shape[-1] - rope :]}
    check(function, arguments | views, backend=BACKEND)


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_without_tokens(name: str) -> None:
    function, case, rope = CASES[name]
    arguments = replace(case, rope=rope).inputs()
    none = {key: arguments[key][:0] for key in ("q", "q_rope", "indices", "topk_length")}
    out, *_ = function(**(arguments | none))
    assert out.shape[0] == 0


@pytest.mark.skipif(machine.interpreting(), reason="the reference's")
@pytest.mark.parametrize("name", ["decode", "decode, v32", "prefill"])
def test_opcheck(name: str) -> None:
    function, case, rope = CASES[name]
    arguments = replace(case, rope=rope, attn_sink=False).inputs()
    api, operation = (decode_api, "sparse_decode") if function is sparse_decode else (prefill_api, "sparse_prefill")
    opcheck(api, operation, lambda: function(**arguments))


@pytest.mark.full
@pytest.mark.skipif(machine.interpreting(), reason="the reference's")
@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_compile(name: str) -> None:
    function, case, rope = CASES[name]
    cases = [replace(case, rope=rope, seed=seed).inputs() for seed in range(2)]
    for one in cases:
        if isinstance(case, SparseDecodeCase):
            one["cache_format"] = case.cache_format
    assert_compiles(function, *cases)


@pytest.mark.skipif(machine.interpreting(), reason="the reference's")
def test_precision_fp8() -> None:
    case = SparsePrefillCase(3, 30, 4, 9, rope=64)
    check(sparse_prefill, case.inputs(), precision="fp8", backend="reference")


@pytest.mark.skipif(machine.interpreting(), reason="records launches for a GPU")
@pytest.mark.parametrize(
    ("operation", "backend", "call", "apart"),
    [
        ("sparse_decode", "hopper", {}, True),
        ("sparse_decode", "hopper", {"form": "bf16", "q_pad": 8}, True),
        ("sparse_decode", "hopper", {"q_pad": 3}, False),
        ("sparse_decode", "hopper", {"form": "model1"}, False),
        ("sparse_decode", "portable", {"q_pad": 3}, True),
        ("sparse_decode", "portable", {"form": "model1"}, False),
        ("sparse_prefill", "hopper", {}, True),
        ("sparse_prefill", "hopper", {"q_pad": 3}, False),
        ("sparse_prefill", "hopper", {"head_dim": 512}, False),
        ("sparse_prefill", "hopper", {"s_q": 2112, "heads": 16, "topk": 512, "s_kv": 4096}, True),
        ("sparse_prefill", "portable", {"q_pad": 3}, True),
        ("sparse_prefill", "portable", {"d_v": 500}, False),
    ],
    ids=str,
)
def test_kernels_read_both_parts_in_place(monkeypatch, operation, backend, call, apart) -> None:
    """They take no joined queries if they can read the parts: a copy would be neither repeated nor as fast."""
    copies = []
    real = query_parts.join
    monkeypatch.setattr(query_parts, "join", lambda q, q_rope: copies.append(q_rope is not None) or real(q, q_rope))
    found = [
        one.launch.arguments
        for one in launches(Recording(monkeypatch), operation, backend, split_q=True, **call)
        if one.name == f"{operation}_kernel"
    ]
    ropes = [value for given in found for name, value in given.items() if name.endswith(("rope_start", "queries_rope"))]
    assert len(ropes) == len(found) > 0
    assert {rope is not None for rope in ropes} == {apart}
    assert any(copies) is not apart


VALID = {
    "decode": replace(V32, rope=64).inputs() | {"cache_format": "v32"},
    "prefill": replace(PREFILL, rope=16).inputs(),
}
FUNCTIONS = {"decode": sparse_decode, "prefill": sparse_prefill}
META = torch.device("meta")


@pytest.mark.skipif(machine.interpreting(), reason="the same checks")
@pytest.mark.parametrize("name", VALID)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda rope: rope.tolist(), TypeError, "^q_rope must be a tensor, got list$"),
        (lambda rope: rope.half(), TypeError, "^q_rope must be bfloat16, got float16$"),
        (lambda rope: rope[..., :3, :], ValueError, r"^q_rope must have shape \[.*, 4, rope\] .* got \[.*, 3, \d+\]$"),
        (lambda rope: rope[0], ValueError, r"^q_rope must have shape \[.*, 4, rope\] .* got "),
        (lambda rope: rope[..., :0], ValueError, r"^q_rope must have shape .* no empty axis but the first [12], got "),
        (lambda rope: rope.to(META), ValueError, "^q_rope must be on cpu like the other arguments, got meta$"),
        (lambda rope: rope[..., ::2], ValueError, "^q_rope must have last stride 1, got strides"),
        (
            lambda rope: rope[..., :-1],
            ValueError,
            r"^k(_cache|v).* must have rows of q's and q_rope's \d+ elements, got ",
        ),
    ],
)
def test_errors_name_the_argument(name: str, change: Callable[..., Any], error: type, message: str) -> None:
    valid = VALID[name]
    FUNCTIONS[name](**valid)
    with pytest.raises(error, match=message):
        FUNCTIONS[name](**(valid | {"q_rope": change(valid["q_rope"])}))


@pytest.mark.skipif(machine.interpreting(), reason="the same checks")
@pytest.mark.parametrize("name", VALID)
def test_the_rotated_part_is_an_input_like_q(monkeypatch, name: str) -> None:
    """Its gradient is dropped with a warning, and the output must not begin at its address."""
    monkeypatch.setattr(gradients, "_warned", set())
    valid, function = VALID[name], FUNCTIONS[name]
    with pytest.warns(UserWarning, match="has no backward"):
        function(**(valid | {"q_rope": valid["q_rope"].detach().clone().requires_grad_()}))
    rope = valid["q_rope"]
    out = torch.zeros(*rope.shape[:-1], valid.get("head_dim_v", valid.get("d_v")), dtype=rope.dtype)
    with pytest.raises(ValueError, match=r"^out must share no memory with q_rope "):
        function(**(valid | {"q_rope": out[..., : rope.shape[-1]], "out": out}))


@pytest.mark.skipif(machine.interpreting(), reason="the same checks")
def test_values_as_wide_as_both_parts() -> None:
    with pytest.raises(
        ValueError, match=r"^head_dim_v must be at most the sum 576 of q's and q_rope's last dimensions, got 577$"
    ):
        sparse_decode(**(VALID["decode"] | {"head_dim_v": 577}))
    with pytest.raises(
        ValueError, match=r"^d_v must be at most the sum 48 of q's and q_rope's last dimensions, got 49$"
    ):
        sparse_prefill(**(VALID["prefill"] | {"d_v": 49}))
    check(sparse_prefill, VALID["prefill"] | {"d_v": 48})
    check(sparse_decode, VALID["decode"] | {"head_dim_v": 570})
