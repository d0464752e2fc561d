"""Which requests each of the two kernels of the Hopper implementation processes; the Triton kernel in the
interpreter.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from flashlatte import paged_attention
from flashlatte.ops.paged_attention import by_length
from flashlatte.ops.paged_attention.reference import PagedAttentionParams
from flashlatte.testing import compare
from flashlatte.testing.paged_attention_case import PagedAttentionCase

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

MIXED = PagedAttentionCase(
    4, 7, 9, 4, 1, head_dim=16, d_v=16, decodes=2, varlen=True, unowned=2, zero_lengths=True, seed=3
)


def problem_of(arguments: dict[str, Any], out: torch.Tensor, lse: torch.Tensor) -> PagedAttentionParams:
    return PagedAttentionParams(
        q=arguments["q"],
        k_cache=arguments["k_cache"].unsqueeze(3),
        v_cache=arguments["v_cache"],
        block_table=arguments["block_table"],
        seqused_k=arguments["seqused_k"],
        cu_seqlens_q=arguments["cu_seqlens_q"],
        k=None,
        v=None,
        softmax_scale=0.25,
        window_left=2**31 - 1,
        window_right=0,
        prefix_ranges=None,
        softcap=0.0,
        alibi_slopes=None,
        alibi_sqrt=False,
        qq_bias=None,
        attn_sink=None,
        k_scale=None,
        k_scale_value=1.0,
        v_scale=None,
        v_scale_value=1.0,
        out_scale=None,
        out_scale_value=1.0,
        empty_lse=-torch.inf,
        out=out,
        lse=lse,
    )


@pytest.mark.parametrize("heads", [4, pytest.param(7, marks=pytest.mark.full)])
def test_each_token_is_written_by_one_kernel(monkeypatch, heads):
    case = replace(MIXED, h_q=heads)
    arguments: dict[str, Any] = case.inputs() | {"softmax_scale": 0.25}
    expected, expected_lse = paged_attention(**arguments, backend="reference")
    bounds = arguments["cu_seqlens_q"].tolist()
    short = torch.zeros(len(expected), dtype=torch.bool)

    def attend_long(problem: PagedAttentionParams, min_queries: int) -> None:
        """Fake of the Gluon kernel, which the interpreter cannot run: marks the rows that it would write."""
        for first, end in pairwise(bounds):
            short[first:end] = end - first < min_queries
        problem.out[~short], problem.lse[~short] = 7.0, 7.0

    monkeypatch.setattr(by_length, "attend_long", attend_long)
    out, lse = torch.full_like(expected, torch.nan), torch.full_like(expected_lse, torch.nan)
    by_length.paged_attention(problem_of(arguments, out, lse))
    lengths = torch.tensor(bounds).diff()
    assert short.sum() == lengths[lengths <= 32 // heads].sum() >= 2
    assert (lengths > 32 // heads).any()
    assert (out[~short] == 7.0).all()
    assert (lse[~short] == 7.0).all()
    compare.assert_close(out[short], expected[short], compare.DENSE_PREFILL_OUT, "out")
    compare.assert_close(lse[short], expected_lse[short], compare.Tolerance(1e-5, 1e-5), "lse")


def test_one_request_is_attended_by_one_kernel(monkeypatch):
    calls = []
    monkeypatch.setattr(by_length, "attend_long", lambda problem, min_queries: calls.append(min_queries))
    monkeypatch.setattr(by_length, "attend", lambda *_, **__: pytest.fail("a second kernel"))
    arguments = replace(MIXED, batch=1, decodes=0, unowned=0).inputs()
    out = torch.empty(arguments["q"].shape)
    by_length.paged_attention(problem_of(arguments, out, out[..., 0]))
    assert calls == [0]
