"""Paged attention on a GPU: every backend compared with the reference, and other guarantees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE, Arguments

import flashlatte
from flashlatte.ops.paged_attention import api
from flashlatte.testing import compare
from flashlatte.testing.paged_attention_case import PagedAttentionCase
from flashlatte.testing.paged_attention_oracle import paged_attention as oracle

pytestmark = pytest.mark.gpu

ON_EVERY_BACKEND = pytest.mark.parametrize("backend", harness.KERNEL_BACKENDS)
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
# Few kinds, as kernels are compiled for each.
KINDS = {
    "plain": {},
    "hnd, window": {"layout": "hnd", "window": 100},
    "in pieces, every term": {
        "layout": "split",
        "softcap": 5.0,
        "alibi": "sqrt",
        "qq_bias": 9,
        "prefix_ranges": 3,
        "sinks": True,
        "window": (50, 3),
    },
    "new keys": {"new_keys": True, "alibi": "linear"},
    "e4m3": {"cache_dtype": E4M3, "scale_kind": "head", "fp8_out": True},
    "e5m2": {"cache_dtype": E5M2, "scale_kind": "tensor", "sinks": True},
    "int8, a scale a head": {"cache_dtype": INT8, "scale_kind": "head"},
    "e5m2, new keys": {"cache_dtype": E5M2, "scale_kind": "tensor", "new_keys": True, "dtype": torch.float16},
    "int8, a scale a token": {"cache_dtype": INT8, "scale_kind": "token", "index_dtype": torch.int64},
}
GRID = harness.pairwise(
    {
        "kind": tuple(KINDS),
        "h_q, h_kv": ((8, 8), (32, 8), (6, 1), (64, 1)),
        "s_q, context": ((1, 3000), (1, 0), (4, 700), (300, 0), (200, 1000)),
        "head_dim, d_v": ((128, 128), (64, 64), (80, 80), (192, 128), (256, 256)),
        "page_size": (16, 64, 48),
        "batch": (1, 5),
        "decodes": (0, 7),
        "unowned": (0, 3),
    }
)
# What only the Gluon kernel has: packs of heads, boxes that are parts of pages and of blocks, its widths.
LONG = PagedAttentionCase(1, 700, 300, 32, 8, page_size=64)
SEVERAL = PagedAttentionCase(3, 150, 500, 32, 8, page_size=64, varlen=True, decodes=5, unowned=3)
HOPPER: dict[str, PagedAttentionCase] = {
    f"{name}, {kind}": replace(case, **fields)
    for kind, case in (("one", LONG), ("several", SEVERAL))
    for name, fields in {
        "page 16": {"page_size": 16, "layout": "hnd"},
        "page 128": {"page_size": 128, "causal": False},
        "page 256": {"page_size": 256, "window": 100},
        "page 48": {"page_size": 48, "h_q": 40, "sinks": True, "index_dtype": torch.int64},
        "window": {"window": (37, 20), "causal": False, "page_size": 16},
        "64": {"page_size": 16, "h_q": 64, "head_dim": 64, "d_v": 64, "sinks": True, "window": 128},
        "96 and 80": {"head_dim": 96, "d_v": 80, "dtype": torch.float16, "strided": True},
        "192 and 128": {"h_q": 16, "h_kv": 16, "head_dim": 192},
        "many heads of one key head": {"h_q": 64, "h_kv": 1},
        "six heads of a key head": {"h_q": 12, "h_kv": 2, "page_size": 32},
        "more queries than keys": {"s_k": 100},
        "long context": {"context": 9000},
    }.items()
}
TYPICAL = PagedAttentionCase(4, 100, 500, 32, 8, varlen=True, decodes=8, unowned=2)


@pytest.fixture(autouse=True)
def _small_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the Gluon kernel also for calls with few rows, for which it is correct but not selected."""
    monkeypatch.setattr(api, "HOPPER_MIN_ROWS", -(2**31))


def attend(arguments: Arguments, backend: str, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with harness.refusals_skip(backend):
        return flashlatte.paged_attention(**(arguments | more), backend=backend)


def check(arguments: Arguments, backend: str, results: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
    out, lse = attend(arguments, backend) if results is None else results
    expected, expected_lse = flashlatte.paged_attention(**arguments, backend="reference")
    if out.dtype == E4M3:
        wanted = expected.float()
        error = (out.float() - wanted).abs()
        # A step of e4m3; and weights rounded to bf16, by half an ulp of 2^-8, of values that may be as large as the
        # largest output.
        assert (error <= wanted.abs() / 8 + 2.0**-9 * wanted.abs().max()).all()
    else:
        compare.assert_close(out, expected, compare.DENSE_PREFILL_OUT, "out")
    compare.assert_close(lse, expected_lse, compare.Tolerance(1e-4, 1e-5), "lse")


@ON_EVERY_BACKEND
@pytest.mark.parametrize("row", GRID, ids=harness.ids(GRID))
def test_grid(row: Arguments, backend: str) -> None:
    fields: Arguments = {name: value for name, value in row.items() if "," not in name and name != "kind"}
    fields |= KINDS[row["kind"]]
    (h_q, h_kv), (s_q, context), (head_dim, d_v) = (row[name] for name in row if "," in name)
    fields |= {"h_q": h_q, "h_kv": h_kv, "s_q": s_q, "context": context, "head_dim": head_dim, "d_v": d_v}
    arguments = PagedAttentionCase(varlen=True, **fields).inputs(DEVICE)
    out, lse = flashlatte.paged_attention(**arguments, backend="reference")
    if out.dtype != E4M3:
        out.fill_(torch.nan)
    results = attend(arguments, backend, out=out, lse=lse.fill_(torch.nan))
    check(arguments, backend, results)


@pytest.mark.parametrize("name", HOPPER)
def test_hopper(name: str) -> None:
    arguments = HOPPER[name].inputs(DEVICE)
    out, lse = flashlatte.paged_attention(**arguments, backend="reference")
    results = attend(arguments, "hopper", out=out.fill_(torch.nan), lse=lse.fill_(torch.nan))
    check(arguments, "hopper", results)
    again = attend(arguments, "hopper")
    harness.assert_same_bits({"out": results[0], "lse": results[1]}, {"out": again[0], "lse": again[1]})


def test_hopper_takes_long_requests_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    arguments = replace(SEVERAL, s_q=400).inputs(DEVICE)
    chosen = flashlatte.paged_attention(**arguments)
    harness.assert_same_bits(
        dict(zip(("out", "lse"), chosen, strict=True)),
        dict(zip(("out", "lse"), attend(arguments, "hopper"), strict=True)),
    )


@ON_EVERY_BACKEND
def test_error_against_float64(backend: str) -> None:
    arguments = PagedAttentionCase(2, 20, 60, 8, 2, head_dim=64, d_v=64, varlen=True).inputs(DEVICE)
    out, _ = attend(arguments, backend)
    compare.assert_accurate(out, oracle(**arguments)[0], oracle(**arguments, dtype=torch.bfloat16)[0], "out")


@ON_EVERY_BACKEND
@pytest.mark.parametrize("case", [TYPICAL, replace(TYPICAL, batch=0, decodes=1, context=60_000)], ids=["mixed", "long"])
def test_same_bits_run_after_run(case: PagedAttentionCase, backend: str) -> None:
    arguments = case.inputs(DEVICE)
    out, lse = attend(arguments, backend)
    for _ in range(4):
        again_out, again_lse = attend(arguments, backend)
        harness.assert_same_bits({"out": out, "lse": lse}, {"out": again_out, "lse": again_lse})


@ON_EVERY_BACKEND
def test_graph_follows_lengths_and_boundaries(backend: str) -> None:
    """Prefills become decodes, and vice versa, in one graph."""
    arguments = replace(TYPICAL, varlen=False, unowned=0).inputs(DEVICE)
    tokens = arguments["q"].shape[0]
    for name in ("k_cache", "v_cache"):
        arguments[name].nan_to_num_(0.1)
    arguments["block_table"] %= arguments["k_cache"].shape[0]
    replay, results = harness.captured(lambda: attend(arguments, backend))
    lengths, boundaries = arguments["seqused_k"], arguments["cu_seqlens_q"]
    for step in range(4):
        cuts = torch.linspace(0, tokens, len(boundaries) - step).int().tolist() + [tokens] * step
        boundaries.copy_(torch.tensor(cuts))
        lengths.copy_((lengths * 3 + 7 * step) % 600)
        for result in results:
            result.fill_(torch.nan)
        replay()
        check(arguments, backend, results)


@ON_EVERY_BACKEND
def test_lengths_pages_and_boundaries_that_are_not_true(backend: str) -> None:
    arguments = replace(TYPICAL, index_dtype=torch.int64, prefix_ranges=2).inputs(DEVICE)
    for name in ("k_cache", "v_cache"):
        arguments[name].nan_to_num_(0.1)
    arguments["seqused_k"][::2] = torch.tensor([2**62, -(2**62)] * 3, device=DEVICE)
    arguments["block_table"][1::2, ::3] = 2**40
    check(arguments, backend)
    arguments["cu_seqlens_q"][3:6] = torch.tensor([2**40, -(2**40), 5], device=DEVICE)
    attend(arguments, backend)
    torch.cuda.synchronize()


@ON_EVERY_BACKEND
def test_new_lengths_compile_nothing(backend: str) -> None:
    def once(batch: int, s_q: int, context: int) -> None:
        attend(replace(TYPICAL, batch=batch, s_q=s_q, context=context, decodes=0).inputs(DEVICE), backend)

    shapes = [(batch, s_q, context) for batch in (1, 3, 17) for s_q in (1, 8, 200) for context in (0, 33, 2000)]
    for shape in shapes:
        once(*shape)
    with harness.no_compilation():
        for batch, s_q, context in shapes:
            once(batch + 1, s_q + 2 if s_q > 1 else 1, context + 100)
