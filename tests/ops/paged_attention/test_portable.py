"""Paged attention's Triton kernels against the reference, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from flashlatte import paged_attention
from flashlatte.ops.paged_attention.portable import launch
from flashlatte.testing import compare
from flashlatte.testing.paged_attention_case import PagedAttentionCase

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
FULL = pytest.mark.full
TOY = PagedAttentionCase(2, 9, 20, 4, 2, head_dim=16, d_v=16, page_size=16, varlen=True)
DECODE = replace(TOY, batch=3, s_q=1, context=40)
EVERYTHING = replace(
    TOY, softcap=2.0, alibi="sqrt", qq_bias=4, sinks=True, prefix_ranges=2, window=(5, 1), unowned=2, decodes=1
)
CASES = {
    "prefill": TOY,
    "decode": DECODE,
    "decodes and a chunk": replace(TOY, batch=1, s_q=20, decodes=3, page_size=5),
    "every term": EVERYTHING,
    "new keys": replace(EVERYTHING, new_keys=True),
    "int8, a scale a token": replace(TOY, cache_dtype=INT8, scale_kind="token", new_keys=True),
    "e4m3": replace(DECODE, cache_dtype=E4M3, scale_kind="head", layout="hnd"),
    "keys in pieces": replace(TOY, layout="split", zero_lengths=True),
    "fp8 out": replace(DECODE, fp8_out=True, context=60),
}
MORE = {
    "not causal": replace(TOY, causal=False),
    "causal, more queries than keys": replace(TOY, s_k=4),
    "window": replace(TOY, context=70, window=7),
    "wide window": replace(TOY, s_q=70, window=(40, 20), causal=False),
    "window without a left bound": replace(TOY, causal=False, window=(-1, 3)),
    "window of a decode": replace(DECODE, context=100, window=20),
    "prefix ranges alone": replace(TOY, s_q=40, prefix_ranges=3, window=3),
    "softcap": replace(DECODE, softcap=0.5),
    "alibi": replace(TOY, alibi="linear"),
    "tree": replace(TOY, batch=3, s_q=6, varlen=False, qq_bias=6),
    "sinks": replace(DECODE, sinks=True, context=100),
    "two parts": replace(TOY, head_dim=48, d_v=32),
    "odd widths": replace(TOY, head_dim=37, d_v=20),
    "80": replace(DECODE, head_dim=80, d_v=80),
    "many heads of one key head": replace(TOY, batch=1, h_q=40, h_kv=1),
    "five heads of a key head": replace(TOY, h_q=5, h_kv=1),
    "fp16": replace(TOY, dtype=torch.float16, strided=True),
    "int64": replace(EVERYTHING, index_dtype=torch.int64),
    "e5m2": replace(TOY, cache_dtype=E5M2, scale_kind="tensor"),
    "e4m3, new keys": replace(TOY, cache_dtype=E4M3, scale_kind="head", new_keys=True),
    "e4m3, a number, in pieces": replace(TOY, cache_dtype=E4M3, layout="split"),
    "fp8 out of a prefill": replace(EVERYTHING, fp8_out=True),
    "many requests": replace(DECODE, batch=70, context=5, h_q=2, h_kv=1),
}


def check(arguments, **more):
    results = paged_attention(**arguments, **more, backend="portable")
    expected = paged_attention(**arguments, backend="reference")
    if results[0].dtype == E4M3:
        error = (results[0].float() - expected[0].float()).abs()
        assert (error <= expected[0].float().abs() / 8 + 2.0**-8).all()
    else:
        compare.assert_close(results[0], expected[0], compare.DENSE_PREFILL_OUT, "out")
    compare.assert_close(results[1], expected[1], compare.Tolerance(1e-5, 1e-5), "lse")
    return results


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=FULL) for name, case in MORE.items()),
    ],
)
def test_against_the_reference(case):
    check(case.inputs())


def test_a_softcap_far_above_the_scores_leaves_them():
    check(replace(TOY, softcap=1e6, softmax_scale=3.0).inputs())


@pytest.mark.parametrize("page_size", [16, *(pytest.param(size, marks=FULL) for size in (5, 32))])
def test_missing_pages_among_keys_visible_to_all_rows(page_size):
    arguments = replace(TOY, s_q=6, context=90, page_size=page_size, varlen=False, h_kv=1, window=80).inputs()
    table = arguments["block_table"]
    table[0, 40 // page_size], table[1, 60 // page_size] = len(arguments["k_cache"]), -1
    check(arguments)


@pytest.mark.parametrize("case", [TOY, pytest.param(replace(EVERYTHING, new_keys=True), marks=FULL)])
def test_masks_as_on_gpus_without_the_branch(monkeypatch, case):
    monkeypatch.setattr(launch, "_BRANCHING", frozenset())
    check(case.inputs())


PREFILL = replace(TOY, s_q=10, decodes=1, unowned=2)
OVER_E4M3 = replace(PREFILL, cache_dtype=E4M3, context=60)


@pytest.mark.parametrize(
    ("case", "tiles_per_sm", "is_whole", "is_ahead"),
    [
        (PREFILL, 1, True, False),
        (OVER_E4M3, 100, False, False),
        (OVER_E4M3, 1, True, True),
        (replace(OVER_E4M3, page_size=8), 1, True, False),
        (replace(EVERYTHING, s_q=10, window=None, page_size=32), 1, True, True),
    ],
)
def test_many_tiles_of_a_prefill_are_a_program_each(monkeypatch, case, tiles_per_sm, is_whole, is_ahead):
    monkeypatch.setattr(launch, "_WHOLE_ABOVE_ROWS", 0)
    monkeypatch.setattr(launch, "_WHOLE_TILES_PER_SM", tiles_per_sm)
    plan, step, seen = launch.make_plan, launch.PagedStep, []
    plan.cache_clear()
    monkeypatch.setattr(launch, "make_plan", lambda *args, **more: seen.append(plan(*args, **more)) or seen[-1])
    monkeypatch.setattr(launch, "PagedStep", lambda **args: seen.append(step(**args)) or seen[-1])
    arguments = case.inputs()
    table = arguments["block_table"]
    table[0, 1], table[-1, 2:] = -1, len(arguments["k_cache"])
    check(arguments)
    plan.cache_clear()
    made, compiled = seen
    assert (made.split.scratch == 0, compiled.ahead) == (is_whole, is_ahead)
