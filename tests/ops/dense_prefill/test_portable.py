# Keyword arguments and boundaries are built in containers of any length.
# pyright: reportArgumentType=false, reportCallIssue=false

"""Dense prefill's Triton kernels against the reference, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from flashlatte import dense_prefill
from flashlatte.ops.dense_prefill import api
from flashlatte.ops.dense_prefill.portable import launch
from flashlatte.testing import compare
from flashlatte.testing.cases import DensePrefillCase

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

TOY = DensePrefillCase(3, 30, 40, 2, 1, head_dim=24, d_v=16, varlen=True, unowned=2)
CAUSAL = replace(TOY, causal=True)
FULL = pytest.mark.full
CASES = {
    "toy": TOY,
    "causal": CAUSAL,
    "more queries than keys": replace(CAUSAL, s_q=50, s_k=20),
    "zero lengths": replace(CAUSAL, batch=6, zero_lengths=True),
    "window": replace(CAUSAL, window=7),
    "wide window": replace(TOY, s_q=70, s_k=70, window=(40, 20)),
    "window without a left bound": replace(TOY, window=(-1, 3)),
    "window without a right bound": replace(TOY, window=(5, -1)),
    "own head each": replace(CAUSAL, h_kv=2),
    "many heads of one key head": replace(CAUSAL, batch=1, h_q=5),
    "views of packed rows": replace(CAUSAL, strided=True),
    "odd widths": replace(CAUSAL, head_dim=37, d_v=20),
    "two parts": replace(CAUSAL, batch=1, head_dim=48, d_v=32),
    "int64 lengths": replace(CAUSAL, batch=1, index_dtype=torch.int64),
    "fp16": replace(CAUSAL, batch=1, dtype=torch.float16),
    "many requests": replace(CAUSAL, batch=70, s_q=1, s_k=1, h_q=1),
    "mla": DensePrefillCase(2, 20, 33, 1, 1, causal=True, varlen=True),
}


def run(arguments, backend, **more):
    """out, lse, dq, dk and dv; lse has a gradient too."""
    generator = torch.Generator().manual_seed(1)
    rows = {name: arguments[name].detach().requires_grad_() for name in ("q", "k", "v")}
    out, lse = dense_prefill(**(arguments | rows), backend=backend, **more)
    dout = (torch.randn(out.shape, generator=generator) / 10).to(out.dtype)
    dlse = torch.randn(lse.shape, generator=generator) / 10
    gradients = torch.autograd.grad((out, lse), list(rows.values()), (dout, dlse.masked_fill(lse.isinf(), torch.nan)))
    return out, lse, *gradients


def check(arguments, **more):
    results, expected = (run(arguments, backend, **more) for backend in ("portable", "reference"))
    for name, result, wanted in zip(("out", "lse", "dq", "dk", "dv"), results, expected, strict=True):
        tolerance = compare.DENSE_PREFILL_LSE if name == "lse" else compare.DENSE_PREFILL_OUT
        assert not result.isnan().any()
        compare.assert_close(result, wanted, tolerance, name)
    return results


QUICK = ("views of packed rows", "zero lengths", "mla")


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=[] if name in QUICK else [FULL]) for name, case in CASES.items()]
)
def test_against_the_reference(case):
    check(case.inputs())


@FULL
def test_masks_as_on_gpus_without_the_branch(monkeypatch):
    monkeypatch.setattr(launch, "_BRANCHING", frozenset())
    check(CASES["wide window"].inputs())


def test_empty_lse():
    check(CASES["more queries than keys"].inputs(), empty_lse=float("inf"))


def filled(outputs_of):
    """The function that allocates outputs, which are filled with NaN."""
    return lambda *args: tuple(output.fill_(torch.nan) for output in outputs_of(*args))


@pytest.mark.parametrize("name", ["cu_seqlens_q", pytest.param("cu_seqlens_k", marks=FULL)])
@pytest.mark.parametrize(
    "boundaries",
    [
        pytest.param((2**31, 5, -3, 20), id="from the end back"),
        pytest.param((3, 20, 11, 40), id="back in the middle", marks=FULL),
        pytest.param((5, -(2**40), 2**33 + 1, 2**40), id="out of 32 bits", marks=FULL),
        pytest.param((0, 7, 2**31 - 1, 12), id="beyond the end and back", marks=FULL),
    ],
)
def test_any_boundaries_leave_no_row_out(name, boundaries, monkeypatch):
    """Boundaries on a device are not checked, and may have any values."""
    monkeypatch.setattr("flashlatte.runtime.ragged.check_boundaries", lambda *_: None)
    monkeypatch.setattr(api, "_fake_forward", filled(api._fake_forward))
    monkeypatch.setattr(api, "_fake_backward", filled(api._fake_backward))
    check(replace(TOY, unowned=0).inputs() | {name: torch.tensor(boundaries, dtype=torch.int64)})


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_keys_visible_to_no_query_may_be_nan(backend):
    arguments = replace(TOY, batch=1, s_q=9, s_k=60, varlen=False, window=(11, 0), unowned=0).inputs()
    first_seen = 60 - 9 - 11
    clean = run(arguments, backend)
    for name in ("k", "v"):
        arguments[name] = arguments[name].clone()
        arguments[name][:first_seen] = torch.nan
    for result, expected in zip(run(arguments, backend), clean, strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_queries_without_visible_keys_may_be_nan(backend):
    """So may the gradients of their outputs, such as those of weights e^(lse - lse')."""
    arguments = replace(CAUSAL, batch=1, s_q=40, s_k=20, varlen=False, unowned=0).inputs()
    dout = torch.randn(40, 2, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    gradients = []
    for fill in (0.0, torch.nan):
        rows = {name: arguments[name].clone() for name in ("q", "k", "v")}
        rows["q"][:20] = dout[:20] = fill
        rows = {name: x.requires_grad_() for name, x in rows.items()}
        out, _ = dense_prefill(**(arguments | rows), backend=backend)
        gradients.append(torch.autograd.grad(out, list(rows.values()), dout))
    for result, expected in zip(*gradients, strict=True):
        assert torch.equal(result, expected)


def test_output_with_gaps_between_its_rows():
    arguments = CAUSAL.inputs()
    tokens = arguments["q"].shape[0]
    whole = torch.full((tokens, 5, 20), torch.nan, dtype=torch.bfloat16)
    out = whole[:, 1:3, :16]
    dense_prefill(**arguments, out=out, backend="portable")
    compare.assert_close(out, dense_prefill(**arguments, backend="reference")[0], compare.DENSE_PREFILL_OUT)
    out.fill_(torch.nan)
    assert whole.isnan().all()


@pytest.mark.full
def test_same_bits_run_after_run():
    for first, second in zip(*(run(CAUSAL.inputs(), "portable") for _ in "12"), strict=True):
        assert first.equal(second)


def test_no_queries_or_no_keys():
    boundaries, nothing = torch.tensor([0, 3, 5]), torch.tensor([0, 0, 0])
    for tokens_q, tokens_k in ((0, 5), (5, 0), (0, 0)):
        rows = [torch.randn(n, 2, 16).half().requires_grad_() for n in (tokens_q, tokens_k, tokens_k)]
        cu_seqlens = (boundaries if tokens_q else nothing, boundaries if tokens_k else nothing)
        out, lse = dense_prefill(*rows, *cu_seqlens, 3, 3, backend="portable")
        out.sum().backward()
        assert out.eq(0).all()
        assert lse.isneginf().all()
        assert all(x.grad is not None and x.grad.eq(0).all() for x in rows)


def test_refuses_rows_that_do_not_fit():
    rows = [torch.zeros(4, 1, 264, dtype=torch.bfloat16) for _ in range(3)]
    boundaries = torch.tensor([0, 4])
    with pytest.raises(ValueError, match="up to 256, not 264"):
        dense_prefill(*rows, boundaries, boundaries, 4, 4, backend="portable")
