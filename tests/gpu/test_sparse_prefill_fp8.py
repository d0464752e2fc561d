"""``sparse_prefill(precision="fp8")`` on a GPU: errors relative to the exact result, compared with the reference's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE, Arguments, Results

import flashlatte
from flashlatte.testing.cases import SparsePrefillCase

pytestmark = pytest.mark.gpu

GRID = harness.pairwise(
    {
        "head_dim": (576, 512),
        "h_q": (1, 3, 16, 64, 96, 128),
        "scope": ((1, 1), (128, 128), (700, 333), (1840, 256), (1521, 512), (3000, 2048)),
        "s_q": (1, 62, 213),
        "dtype": (torch.bfloat16, torch.float16),
        "index_dtype": (torch.int32, torch.int64),
        "topk_lengths": (False, True),
        "attn_sink": (False, True),
        "empty_rows": (0.0, 0.2),
        "duplicates": (False, True),
        "strided": (False, True),
    }
)
LARGER = (
    SparsePrefillCase(s_q=2048, s_kv=2048, h_q=128, topk=2048),
    SparsePrefillCase(s_q=1234, s_kv=4321, h_q=128, topk=2048, topk_lengths=True),
    SparsePrefillCase(s_q=300, s_kv=64, h_q=64, topk=8192, invalid_share=0.99),
    SparsePrefillCase(s_q=1000, s_kv=100_000, h_q=64, topk=2048, invalid_share=0.0, head_dim=512),
)
TYPICAL = SparsePrefillCase(s_q=200, s_kv=3000, h_q=128, topk=1024, topk_lengths=True, empty_rows=0.05)


def prefill(arguments: Arguments, backend: str = "hopper", **options: Any) -> Results:
    with harness.refusals_skip(backend):
        results = flashlatte.sparse_prefill(**arguments, **options, precision="fp8", backend=backend)
    return dict(zip(("out", "max_logits", "lse"), results, strict=True))


def check(arguments: Arguments, results: Results) -> None:
    """The error is at most a tenth larger than the reference's, plus the rounding to 16 bits and the truncated sums.

    Hopper's e4m3 products keep 14 bits of each of the 20 partial sums of a logit, and of a sum of values, which
    loses up to 2⁻¹⁷ of itself with each key (docs/notes/dense-decode-fp8.md).
    """
    reference = prefill(arguments, "reference")
    expected = flashlatte.sparse_prefill(**arguments, backend="reference")[0].double()
    assert not results["out"].isnan().any()
    norm = expected.norm().clamp_min(1e-9)
    errors = [(x["out"].double() - expected).norm() / norm for x in (results, reference)]
    assert errors[0] < 1.1 * errors[1] + 0.005 + arguments["indices"].shape[2] * 2.0**-17
    largest = reference["max_logits"].abs().nan_to_num(posinf=0.0).max().item()
    for name in ("max_logits", "lse"):
        torch.testing.assert_close(results[name], reference[name], atol=1e-3 + 20 * 2.0**-13 * largest, rtol=1e-5)


@pytest.mark.parametrize("row", GRID, ids=harness.ids(GRID))
def test_shapes(row: Arguments) -> None:
    row = dict(row)
    s_kv, topk = row.pop("scope")
    arguments = SparsePrefillCase(**row, s_kv=s_kv, topk=topk).inputs(DEVICE)
    out = torch.full((*arguments["q"].shape[:2], 512), torch.nan, dtype=arguments["q"].dtype, device=DEVICE)
    check(arguments, prefill(arguments, out=out))


@pytest.mark.parametrize("case", LARGER, ids=str)
def test_larger_cases(case: SparsePrefillCase) -> None:
    arguments = case.inputs(DEVICE)
    check(arguments, prefill(arguments))


@pytest.mark.parametrize("sharpness", [0, 0.1, 1, 3])
@pytest.mark.parametrize("h_q", [64, 128])
def test_equal_plain_and_peaked_weights(h_q: int, sharpness: float) -> None:
    arguments = replace(TYPICAL, h_q=h_q, attn_sink=False).inputs(DEVICE)
    arguments["q"] = arguments["q"] * sharpness
    check(arguments, prefill(arguments))


@pytest.mark.parametrize("size", [1e-20, 1e-5, 1e5, 1e20])
def test_sizes_of_queries(size: float) -> None:
    arguments = TYPICAL.inputs(DEVICE)
    arguments |= {"q": arguments["q"] * size, "softmax_scale": 0.5 / size}
    check(arguments, prefill(arguments))


@pytest.mark.parametrize("column", [3, 300, 550])
def test_a_nan_of_a_selected_key_is_seen(column: int) -> None:
    arguments = replace(TYPICAL, invalid_share=0.0, empty_rows=0.0, topk_lengths=False).inputs(DEVICE)
    arguments["kv"].nan_to_num_(nan=0.1)
    row = int(arguments["indices"][5, 0, 700])
    arguments["kv"][row, 0, column] = torch.nan
    selecting = (arguments["indices"][:, 0] == row).any(1)
    assert prefill(arguments)["out"].isnan().flatten(1).any(1).equal(selecting)


@pytest.mark.parametrize("form", [{}, {"h_q": 64}, {"head_dim": 512}, {"topk": 100}], ids=str)
def test_same_bits_run_after_run(form: Arguments) -> None:
    arguments = replace(TYPICAL, **form).inputs(DEVICE)
    first = prefill(arguments)
    check(arguments, first)
    for _ in range(5):
        harness.assert_same_bits(first, prefill(arguments))


def test_graph_follows_indices_and_lengths() -> None:
    arguments = replace(TYPICAL, s_q=150).inputs(DEVICE)
    arguments["kv"].nan_to_num_(nan=0.1)
    indices, lengths = arguments["indices"].clone(), arguments["topk_length"].clone()
    arguments["topk_length"].fill_(1)
    replay, results = harness.captured(lambda: prefill(arguments))
    for new_indices, new_lengths in ((indices, lengths), (indices.flip(0), lengths // 3), (indices.flip(2), lengths)):
        arguments["indices"].copy_(new_indices)
        arguments["topk_length"].copy_(new_lengths)
        harness.nan_outputs(**results)
        replay()
        check(arguments, results)
