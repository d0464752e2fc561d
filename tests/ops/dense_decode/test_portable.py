"""Dense decode's Triton kernel against the reference, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from support.marks import mostly_full

from flashlatte import dense_decode
from flashlatte.kernels.triton import config as portable_config
from flashlatte.kernels.triton.config import AttentionConfig
from flashlatte.ops.dense_decode.portable import launch
from flashlatte.split_kv import plan
from flashlatte.testing import compare
from flashlatte.testing.cases import DenseDecodeCase

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

FP8 = torch.float8_e4m3fn
TOY = DenseDecodeCase(batch=3, s_q=2, s_k=70, h_q=4, head_dim=48, head_dim_v=32, page_size=16, varlen=True)
CASES = {
    "toy": TOY,
    "two kv heads, causal": replace(TOY, h_kv=2, causal=True),
    "no rope": replace(TOY, head_dim=32, page_size=64),
    "odd sizes": replace(TOY, h_q=3, head_dim=37, head_dim_v=20, page_size=7, causal=True),
    "pages of one token": replace(TOY, s_k=20, page_size=1),
    "many rows": replace(TOY, s_q=3, h_q=30, causal=True),
    "fewer keys than queries": replace(TOY, s_q=5, s_k=3, varlen=False, causal=True),
    "empty requests": replace(TOY, batch=6, zero_lengths=True),
    "gaps between rows": replace(TOY, strided=True),
    "int64 indices": replace(TOY, index_dtype=torch.int64),
    "fp16": replace(TOY, dtype=torch.float16),
    "fp8": replace(TOY, cache_dtype=FP8, page_size=5),
    "separate rope": replace(TOY, separate_rope=True),
    "one long request": replace(TOY, batch=1, s_q=1, s_k=300, varlen=False),
    "mla": DenseDecodeCase(batch=2, s_q=1, s_k=40, h_q=16, varlen=True),
}


def decode(arguments, **more):
    q = arguments["q"]
    outputs = {
        "out": torch.full((*q.shape[:3], arguments["head_dim_v"]), torch.nan, dtype=q.dtype),
        "lse": torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan),
    }
    return dense_decode(**arguments, **outputs, backend="portable", **more)


def check(arguments, result=None, **more):
    """Check that ``result``, or the result of decode if None, is the reference's."""
    out, lse = decode(arguments, **more) if result is None else result
    wanted_out, wanted_lse = dense_decode(**arguments, **more, backend="reference")
    compare.assert_close(out, wanted_out, compare.DENSE_DECODE_OUT, "out")
    compare.assert_close(lse, wanted_lse, compare.DECODE_LSE, "lse")


QUICK = (
    "two kv heads, causal",
    "odd sizes",
    "many rows",
    "fewer keys than queries",
    "empty requests",
    "gaps between rows",
    "int64 indices",
    "fp8",
    "mla",
)


@pytest.mark.parametrize("name", mostly_full(CASES, *QUICK))
def test_against_the_reference(name):
    check(CASES[name].inputs())


@pytest.mark.parametrize("name", mostly_full(["two kv heads, causal", "empty requests", "many rows"], "empty requests"))
def test_batch_invariant_against_the_reference(name):
    check(CASES[name].inputs(), batch_invariant=True)


def test_scale_of_the_cache_on_the_device():
    arguments = CASES["fp8"].inputs()
    check(arguments | {"k_scale": torch.tensor([0.3])})


def test_scale_of_the_softmax_and_empty_lse():
    check(CASES["empty requests"].inputs() | {"softmax_scale": 0.7}, empty_lse=float("inf"))


@pytest.mark.parametrize("causal", [False, True])
def test_pages_outside_the_cache_and_lengths_outside_the_table_are_not_seen(causal):
    arguments = replace(TOY, batch=5, varlen=False, causal=causal).inputs()
    arguments["k_cache"].nan_to_num_(nan=0.1)  # the lengths below include positions that must not be read
    table = arguments["block_table"]
    table[0, 0], table[1, 1], table[2, :] = -1, -(2**31), 2**31 - 1
    arguments["cache_seqlens"][3], arguments["cache_seqlens"][4] = 2**31 - 1, -5
    check(arguments)


def test_lengths_that_are_not_neighbors():
    arguments = TOY.inputs()
    check(arguments | {"cache_seqlens": arguments["cache_seqlens"].repeat_interleave(2)[::2]})


def test_nan_keys_of_one_request_stay_there():
    arguments = replace(TOY, varlen=False).inputs()
    expected, _ = decode(arguments)
    arguments["k_cache"][arguments["block_table"][1, 0]] = torch.nan
    out, lse = decode(arguments)
    assert out[1].isnan().all()
    assert lse[1].isnan().all()
    assert torch.equal(out[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("page_size", [7, pytest.param(32, marks=pytest.mark.full)])
def test_laid_out_for_warp_groups(monkeypatch, page_size, cache_dtype):
    config = AttentionConfig(64, 32, num_warps=1, warpgroups=True)
    monkeypatch.setitem(launch.FP8_TABLE if cache_dtype == FP8 else launch.TABLE, "interpreter", (config,))
    monkeypatch.setattr(portable_config, "_WARPGROUP_TILES", ((32, 16),))
    launch.make_plan.cache_clear()
    check(replace(TOY, h_q=35, causal=True, page_size=page_size, cache_dtype=cache_dtype).inputs())
    launch.make_plan.cache_clear()


@pytest.mark.parametrize(
    "changed",
    [
        {"causal": True},
        pytest.param({"page_size": 32, "head_dim": 32}, marks=pytest.mark.full),
        {"page_size": 64, "h_kv": 2, "strided": True},
        {"s_q": 5, "s_k": 3, "varlen": False, "causal": True, "page_size": 16},
        {"zero_lengths": True, "batch": 6, "index_dtype": torch.int64},
        {"page_size": 24},
    ],
    ids=str,
)
def test_tiles_by_tma(monkeypatch, changed):
    config = AttentionConfig(64, 16, num_warps=1, warpgroups=True, boxes=True)
    monkeypatch.setitem(launch.TABLE, "interpreter", (config,))
    monkeypatch.setattr(portable_config, "_WARPGROUP_TILES", ((32, 0), (32, 16)))
    made = []
    monkeypatch.setattr(launch, "_boxes", lambda *given, boxes=launch._boxes: made.append(boxes(*given)) or made[-1])
    launch.make_plan.cache_clear()
    case = replace(TOY, **changed)
    arguments = case.inputs()
    arguments["block_table"][1, 0] = -1
    check(arguments)
    launch.make_plan.cache_clear()
    assert (made[0][0] is not None) == (case.page_size % 16 == 0)


def test_batch_invariant_is_the_same_alone_and_in_any_launch(monkeypatch):
    monkeypatch.setattr(launch, "_SPLIT_KEYS", 48)
    monkeypatch.setattr(plan, "MAX_SCRATCH_BYTES", 40_000)
    launch.make_plan.cache_clear()
    plan.fixed_launches.cache_clear()
    arguments = replace(TOY, batch=4, s_k=200).inputs()
    together, together_lse = decode(arguments, batch_invariant=True)
    max_pages = arguments["block_table"].shape[1]
    made = launch.make_plan("interpreter", 4, 4, 8, 1, 48, 32, 16, max_pages, False, True)
    assert len(made.split.launches) > 1
    assert made.split.splits > 1
    one = slice(2, 3)
    alone = {name: arguments[name][one] for name in ("q", "block_table", "cache_seqlens")}
    out, lse = decode(arguments | alone, batch_invariant=True)
    assert torch.equal(out, together[one])
    assert torch.equal(lse, together_lse[one])
    check(arguments, (together, together_lse), batch_invariant=True)


@pytest.mark.parametrize("split_keys", [pytest.param(48, marks=pytest.mark.full), 1024])
def test_batch_invariant_in_a_wider_table_among_others_and_in_another_order(monkeypatch, split_keys):
    monkeypatch.setattr(launch, "_SPLIT_KEYS", split_keys)
    launch.make_plan.cache_clear()
    arguments = replace(TOY, batch=3, s_k=150, varlen=True).inputs()
    expected = decode(arguments, batch_invariant=True)
    order = torch.tensor([2, 0, 1])
    others = {name: arguments[name][order] for name in ("q", "block_table", "cache_seqlens")}
    others["block_table"] = torch.nn.functional.pad(others["block_table"], (0, 40), value=-7)
    for result, wanted in zip(decode(arguments | others, batch_invariant=True), expected, strict=True):
        assert torch.equal(result, wanted[order])
    others["cache_seqlens"][0] = 0
    for result, wanted in zip(decode(arguments | others, batch_invariant=True), expected, strict=True):
        assert torch.equal(result[1:], wanted[order][1:])
    launch.make_plan.cache_clear()


def test_same_bits_run_after_run():
    arguments = CASES["one long request"].inputs()
    first, second = decode(arguments), decode(arguments)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
