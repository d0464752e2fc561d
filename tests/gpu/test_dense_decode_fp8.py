"""``dense_decode(precision="fp8")`` on a GPU: errors relative to float64, compared with those of the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE, Arguments, Results

import flashlatte
from flashlatte import flash_mla
from flashlatte.kernels import fp8_attention
from flashlatte.testing import oracles
from flashlatte.testing.cases import DenseDecodeCase

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
GRID = harness.pairwise(
    {
        "batch": (1, 3, 40, 150),
        "s_q": (1, 2, 3),
        "s_k": (1, 64, 129, 900, 4096),
        "h_q, h_kv": ((1, 1), (16, 1), (63, 1), (128, 1), (6, 3)),
        "head_dim": (576, 512),
        "page_size": (8, 16, 48, 64, 128),
        "dtype": (torch.bfloat16, torch.float16),
        "varlen": (False, True),
        "causal": (False, True),
        "zero_lengths": (False, True),
        "strided": (False, True),
    }
)
TYPICAL = DenseDecodeCase(batch=32, s_q=2, s_k=1500, h_q=128, varlen=True, causal=True, cache_dtype=E4M3)


def decode(arguments: Arguments, backend: str = "hopper", **options: Any) -> Results:
    with harness.refusals_skip(backend):
        out, lse = flashlatte.dense_decode(**arguments, precision="fp8", backend=backend, **options)
    return {"out": out, "lse": lse}


def check(arguments: Arguments, results: Results) -> None:
    """The error is at most a tenth larger than the reference's, plus the rounding to 16 bits.

    The tensor cores keep about 14 bits of a sum, and so of a logit.
    """
    reference = decode(arguments, "reference")
    expected, _ = oracles.dense_decode(**arguments)
    assert not results["out"].isnan().any()
    assert error(results, expected) < 1.1 * error(reference, expected) + 0.005
    torch.testing.assert_close(results["lse"], reference["lse"], atol=2e-3, rtol=2.0**-12)


def error(results: Results, expected: torch.Tensor) -> float:
    return float((results["out"].double() - expected).norm() / expected.norm().clamp_min(1e-9))


@pytest.mark.parametrize("row", GRID, ids=harness.ids(GRID))
def test_shapes(row: Arguments) -> None:
    row = dict(row)
    h_q, h_kv = row.pop("h_q, h_kv")
    arguments = DenseDecodeCase(**row, h_q=h_q, h_kv=h_kv, cache_dtype=E4M3).inputs(DEVICE)
    check(arguments, decode(arguments, **harness.poisoned_decode_outputs(arguments)))


@pytest.mark.parametrize(
    ("batch", "s_k", "sharpness"),
    [
        (128, 4096, 1),
        (128, 4096, 40),
        (128, 4096, 150),
        (2, 32768, 1),
        (2, 32768, 150),
        (1, 131072, 40),
        (1, 131072, 150),
    ],
)
def test_equal_plain_and_peaked_weights(batch: int, s_k: int, sharpness: float) -> None:
    arguments = DenseDecodeCase(batch, 1, s_k, 128, cache_dtype=E4M3).inputs(DEVICE)
    arguments["q"] = arguments["q"] * sharpness
    check(arguments, decode(arguments))


def test_equal_weights_of_many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split rounds P relative to its own maximum, which decides the error where all weights are nearly equal.

    The error is at most that of the reference with the worst of eight exponents.
    """
    arguments = DenseDecodeCase(1, 1, 131072, 128, cache_dtype=E4M3).inputs(DEVICE)
    expected, _ = oracles.dense_decode(**arguments)
    results = decode(arguments)
    errors = []
    for eighth in range(8):
        monkeypatch.setattr(fp8_attention, "P_EXPONENT", 5 + eighth / 8)
        errors.append(error(decode(arguments, "reference"), expected))
    assert error(results, expected) < 1.1 * max(errors) + 0.005


@pytest.mark.parametrize("sharpness", [0, 1e-20, 1e20])
def test_sizes_of_queries(sharpness: float) -> None:
    arguments = replace(TYPICAL, batch=3, softmax_scale=1e-20 if sharpness > 1 else 0.05).inputs(DEVICE)
    arguments["q"] = arguments["q"] * sharpness
    check(arguments, decode(arguments))


@pytest.mark.parametrize("column", [3, 300, 575])
def test_a_nan_of_the_cache_is_seen(column: int) -> None:
    arguments = replace(TYPICAL, batch=2, s_k=300, varlen=False, causal=False).inputs(DEVICE)
    page = arguments["block_table"][0, 2]
    arguments["k_cache"].view(torch.uint8)[page, 5, 0, column] = 0x7F
    assert decode(arguments)["out"].isnan().flatten(1).any(1).tolist() == [True, False]


@pytest.mark.parametrize("form", [{}, {"h_q": 16}, {"s_q": 1, "s_k": 9000}], ids=str)
def test_batch_invariant_is_the_same_alone(form: Arguments) -> None:
    arguments = replace(TYPICAL, **{"batch": 19, "s_k": 3000} | form).inputs(DEVICE)
    together = decode(arguments, batch_invariant=True)
    for request in (0, 7, 18):
        one = slice(request, request + 1)
        per_request = {name: arguments[name][one] for name in ("q", "block_table", "cache_seqlens")}
        alone = decode(arguments | per_request, batch_invariant=True)
        harness.assert_same_bits(alone, {name: result[one] for name, result in together.items()})


@pytest.mark.parametrize("form", [{}, {"page_size": 16}, {"batch": 2, "s_k": 9000}, {"h_q": 16}], ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_same_bits_run_after_run(form: Arguments, batch_invariant: bool) -> None:
    arguments = replace(TYPICAL, **form).inputs(DEVICE)
    first = decode(arguments, batch_invariant=batch_invariant)
    check(arguments, first)
    for _ in range(3):
        harness.assert_same_bits(first, decode(arguments, batch_invariant=batch_invariant))


def test_graph_follows_lengths_and_pages() -> None:
    arguments = replace(TYPICAL, batch=9, s_k=5000).inputs(DEVICE)
    lengths, table = arguments["cache_seqlens"].clone(), arguments["block_table"].clone()
    arguments["cache_seqlens"].fill_(1)
    outputs = harness.poisoned_decode_outputs(arguments)
    replay, results = harness.captured(lambda: decode(arguments, **outputs))
    order = torch.arange(8, -1, -1, device=DEVICE)
    for new_lengths, new_table in ((lengths, table), (lengths // 3, table), (lengths[order], table[order])):
        arguments["cache_seqlens"].copy_(new_lengths)
        arguments["block_table"].copy_(new_table)
        harness.nan_outputs(**outputs)
        replay()
        check(arguments, results)


def test_queries_in_e4m3_in_a_graph() -> None:
    """SGLang's calls of the drop-in: scales are tensors, and replays read new lengths and scales."""
    arguments = replace(TYPICAL, s_q=1).inputs(DEVICE)
    q, scale = (arguments["q"] * 8).to(E4M3), torch.full((1,), 0.37, device=DEVICE)
    lengths = arguments["cache_seqlens"]

    def call(precision: str | None) -> torch.Tensor:
        return flash_mla.flash_mla_with_kvcache(
            q,
            arguments["k_cache"],
            arguments["block_table"],
            lengths,
            512,
            flash_mla.FlashMLASchedMeta(),
            softmax_scale=arguments["softmax_scale"],
            causal=True,
            descale_q=scale,
            descale_k=scale,
            precision=precision,
        )[0]

    call("fp8")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call("fp8")
    for factor in (1.0, 2.3):
        scale.mul_(factor)
        lengths.sub_(7).clamp_(min=1)
        graph.replay()
        expected = call(None)
        assert float((out.double() - expected.double()).norm() / expected.double().norm()) < 0.03
