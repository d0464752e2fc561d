"""Sparse prefill's Triton kernel against the reference, in Triton's interpreter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.marks import mostly_full

from flashlatte import sparse_prefill
from flashlatte.ops.sparse_prefill import by_token
from flashlatte.ops.sparse_prefill.reference import SparsePrefillParams
from flashlatte.testing import compare
from flashlatte.testing.cases import SparsePrefillCase

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

TOY = SparsePrefillCase(s_q=4, s_kv=40, h_q=4, topk=37, head_dim=48, d_v=32)
MLA = SparsePrefillCase(s_q=2, s_kv=50, h_q=16, topk=40)
CASES = {
    "toy": TOY,
    "no rope": replace(TOY, head_dim=32),
    "odd sizes": replace(TOY, head_dim=37, d_v=20, h_q=3),
    "more rope than values": replace(TOY, head_dim=48, d_v=16),
    "one key": replace(TOY, topk=1),
    "lengths": replace(TOY, s_q=8, topk_lengths=True),
    "many heads": replace(TOY, h_q=70, topk_lengths=True),
    "empty rows": replace(TOY, s_q=8, empty_rows=0.5),
    "all rows empty": replace(TOY, empty_rows=1.0),
    "every token twice": replace(TOY, topk=70, duplicates=True),
    "gaps between rows": replace(TOY, strided=True),
    "no sink": replace(TOY, attn_sink=False),
    "int64 indices": replace(TOY, index_dtype=torch.int64, topk_lengths=True),
    "fp16": replace(TOY, dtype=torch.float16),
    "mla": MLA,
    "mla without rope": replace(MLA, head_dim=512),
}


def check(arguments, **more):
    q = arguments["q"]
    out = torch.full((*q.shape[:2], arguments["d_v"]), torch.nan, dtype=q.dtype)
    results = sparse_prefill(**arguments, out=out, backend="portable", **more)
    expected = sparse_prefill(**arguments, backend="reference", **more)
    compare.assert_close(results[0], expected[0], compare.SPARSE_PREFILL_OUT, "out")
    compare.assert_close(results[1], expected[1], compare.SPARSE_PREFILL_LSE, "max_logits")
    compare.assert_close(results[2], expected[2], compare.SPARSE_PREFILL_LSE, "lse")
    return results


QUICK = (
    "odd sizes",
    "more rope than values",
    "lengths",
    "empty rows",
    "every token twice",
    "gaps between rows",
    "int64 indices",
    "mla",
)


@pytest.mark.parametrize("name", mostly_full(CASES, *QUICK))
def test_against_the_reference(name):
    check(CASES[name].inputs())


@pytest.mark.parametrize("head_dim", [576, pytest.param(512, marks=pytest.mark.full)])
def test_laid_out_for_warp_groups(monkeypatch, head_dim):
    config = by_token.AttentionConfig(64, 32, num_warps=1, warpgroups=True)
    monkeypatch.setitem(by_token.SELECTED_ROWS, "interpreter", (config,))
    by_token._config.cache_clear()
    check(replace(MLA, head_dim=head_dim, h_q=70, s_q=3, empty_rows=0.3).inputs())
    by_token._config.cache_clear()


def test_empty_lse():
    check(CASES["empty rows"].inputs(), empty_lse=float("inf"))


def test_lengths_outside_the_list():
    arguments = TOY.inputs()
    length = torch.tensor([-5, 2**31 - 1, 0, 3], dtype=torch.int32)
    check(arguments | {"topk_length": length})
    check(arguments | {"topk_length": length.long() * 2**20})


def test_lengths_and_sinks_that_are_not_neighbors():
    arguments = replace(TOY, topk_lengths=True).inputs()
    apart = {name: arguments[name].repeat_interleave(2)[::2] for name in ("topk_length", "attn_sink")}
    check(arguments | apart)


def test_output_with_gaps_between_its_rows():
    arguments = TOY.inputs()
    whole = torch.full((4, 9, 40), torch.nan, dtype=torch.bfloat16)
    out = whole[:, :8:2, :32]
    sparse_prefill(**arguments, out=out, backend="portable")
    expected, _, _ = sparse_prefill(**arguments, backend="reference")
    compare.assert_close(out, expected, compare.SPARSE_PREFILL_OUT)
    out.fill_(torch.nan)
    assert whole.isnan().all()


def test_nan_in_a_selected_row_stays_with_the_tokens_that_selected_it():
    arguments = replace(TOY, invalid_share=0.0).inputs()
    expected, _, _ = check(arguments)
    row = arguments["indices"][1, 0, 5]
    selected = (arguments["indices"] == row).any(dim=-1)[:, 0]
    arguments["kv"][row] = torch.nan
    out, _, lse = sparse_prefill(**arguments, backend="portable")
    finite_sink = arguments["attn_sink"] < torch.inf
    assert lse[selected].isnan().all()
    assert out[selected][:, finite_sink].isnan().all()
    assert torch.equal(out[~selected], expected[~selected])


def test_recomputes_only_damaged_entries():
    arguments = replace(TOY, s_q=5).inputs()
    before = sparse_prefill(**arguments, backend="portable")
    results = [torch.full_like(result, 7.0) for result in before]
    named: dict[str, Any] = dict(zip(("out", "max_logits", "lse"), results, strict=True))
    named |= {"empty_lse": float("-inf")} | {
        name: arguments[name] for name in ("q", "kv", "indices", "topk_length", "attn_sink", "softmax_scale")
    }
    by_token.sparse_prefill(SparsePrefillParams(**named), damaged=torch.tensor([0, 1, 0], dtype=torch.int32), group=2)
    anew = torch.tensor([False, False, True, True, False])
    for result, expected in zip(results, before, strict=True):
        assert torch.equal(result[anew], expected[anew])
        assert (result[~anew] == 7.0).all()


def test_same_bits_run_after_run():
    arguments = TOY.inputs()
    for first, second in zip(*(sparse_prefill(**arguments, backend="portable") for _ in range(2)), strict=True):
        assert torch.equal(first, second)


def test_refuses_rows_that_do_not_fit():
    arguments = replace(TOY, head_dim=1040).inputs()
    with pytest.raises(ValueError, match="up to 1024, not 1040"):
        sparse_prefill(**arguments, backend="portable")
