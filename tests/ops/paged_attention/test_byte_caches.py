"""One-byte caches that are read as words: which they are, and their results in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.launches import launches, main_kernels
from support.recording import Recording

from flashlatte import paged_attention
from flashlatte.runtime import machine
from flashlatte.testing import compare
from flashlatte.testing.paged_attention_case import PagedAttentionCase

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
FULL = pytest.mark.full
DECODE = PagedAttentionCase(3, 1, 40, 4, 2, head_dim=64, d_v=64, cache_dtype=E4M3, scale_kind="head", decodes=1)
CASES = {
    "e4m3": DECODE,
    "e5m2, heads of tokens": replace(DECODE, cache_dtype=E5M2, layout="hnd", scale_kind="tensor", page_size=8),
    "int8, 16 rows": replace(DECODE, cache_dtype=INT8, h_q=16, h_kv=1, page_size=20),
    "requests in parts, key heads in pairs": replace(DECODE, h_q=8, h_kv=4, context=90, unowned=1),
}
MORE = {
    "a window and sinks": replace(DECODE, context=100, window=20, sinks=True),
    "tokens of no request": replace(DECODE, unowned=2, zero_lengths=True),
    "two tokens each, more than the keys": replace(DECODE, s_q=2, s_k=1, batch=4),
    "three heads, 128": replace(DECODE, h_q=6, head_dim=128, d_v=128, index_dtype=torch.int64),
    "keys of 64 and values of 128": replace(DECODE, d_v=128, dtype=torch.float16),
    "fp8 out": replace(DECODE, fp8_out=True),
    "three key heads": replace(DECODE, h_q=6, h_kv=3, varlen=True),
}


def assert_same(arguments: dict[str, Any]) -> None:
    results = paged_attention(**arguments, backend="portable")
    expected = paged_attention(**arguments, backend="reference")
    if results[0].dtype == E4M3:
        error = (results[0].float() - expected[0].float()).abs()
        assert (error <= expected[0].float().abs() / 8 + 2.0**-8).all()
    else:
        compare.assert_close(results[0], expected[0], compare.DENSE_PREFILL_OUT, "out")
    compare.assert_close(results[1], expected[1], compare.Tolerance(1e-5, 1e-5), "lse")


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=FULL) for name, case in MORE.items()),
    ],
)
def test_against_the_reference(case: PagedAttentionCase):
    assert_same(case.inputs())


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e30])
def test_queries_beyond_fp16(magnitude: float):
    arguments = DECODE.inputs()
    arguments["q"][0] *= magnitude
    assert_same(arguments | {"softmax_scale": 0.1 / max(magnitude, 1e-30)})


CHOICES: list[tuple[dict[str, Any], bool]] = [
    ({"cache_dtype": E4M3}, True),
    ({"cache_dtype": E5M2, "head_dim": 64}, True),
    ({"cache_dtype": INT8, "hnd": True}, True),
    ({"cache_dtype": E4M3, "heads": 128}, True),
    ({"cache_dtype": E4M3, "heads": 256}, False),
    ({}, False),
    ({"cache_dtype": E4M3, "tokens": 1024}, False),
    ({"cache_dtype": E4M3, "head_dim": 96}, False),
    ({"cache_dtype": E4M3, "d_v": 256}, False),
    ({"cache_dtype": E4M3, "in_pieces": True}, False),
    ({"cache_dtype": E4M3, "new_keys": True}, False),
    ({"cache_dtype": INT8, "per_token": True}, False),
    *(({"cache_dtype": E4M3, "terms": terms}, False) for terms in ("alibi", "bias", "prefix", "softcap")),
    ({"cache_dtype": E4M3, "terms": "sink", "window": (50, 0)}, True),
    ({"cache_dtype": E4M3, "arch": 80}, False),
]


@pytest.mark.skipif(machine.interpreting(), reason="records what would be compiled")
@pytest.mark.parametrize(("call", "expected"), CHOICES)
def test_which_calls_read_words(monkeypatch: pytest.MonkeyPatch, call: dict[str, Any], expected: bool):
    call = {"tokens": 4, "requests": 4, **call}
    (attention,) = main_kernels(launches(Recording(monkeypatch), "paged_attention", "portable", **call))
    assert attention.launch.arguments["STEP"].in_words is expected


@pytest.mark.skipif(machine.interpreting(), reason="records what would be compiled")
@pytest.mark.parametrize(("kv_heads", "together"), [(8, 4), (4, 4), (6, 2), (3, 1)])
def test_a_warp_for_each_key_head(monkeypatch: pytest.MonkeyPatch, kv_heads: int, together: int):
    call = {"tokens": 128, "requests": 128, "heads": 4 * kv_heads, "kv_heads": kv_heads, "cache_dtype": E4M3}
    (attention,) = main_kernels(launches(Recording(monkeypatch), "paged_attention", "portable", **call))
    assert attention.launch.arguments["STEP"].key_heads == attention.launch.options["num_warps"] == together
    # Each token has one tile; with 8 key heads, CTAs process whole requests.
    arguments = attention.launch.arguments
    assert arguments["tile_lengths_num_tiles"] == 128
    assert kv_heads != 8 or arguments["grid_num_splits"] == 128
    assert attention.launch.grid == (arguments["grid_num_splits"] * kv_heads // together,)
