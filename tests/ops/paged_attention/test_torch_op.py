from dataclasses import replace

import pytest
import torch
from support.torch_op import assert_compiles, opcheck

from flashlatte import paged_attention
from flashlatte.ops.paged_attention import api
from flashlatte.testing.paged_attention_case import PagedAttentionCase

CASE = PagedAttentionCase(2, 3, 6, 4, 2, head_dim=16, d_v=16, page_size=4, dtype=torch.float32, layout="split")
EVERYTHING = replace(
    CASE, prefix_ranges=2, qq_bias=3, sinks=True, alibi="linear", softcap=2.0, cache_dtype=torch.int8, scale_kind="head"
)


def test_opcheck():
    opcheck(api, "paged_attention", lambda: paged_attention(**EVERYTHING.inputs()))


@pytest.mark.full
def test_compile():
    cases = [replace(CASE, batch=batch, context=context).inputs() for batch, context in ((2, 6), (3, 9))]
    assert_compiles(paged_attention, *cases, EVERYTHING.inputs(), replace(CASE, new_keys=True, window=(3, 1)).inputs())


def test_a_scale_for_each_head_in_a_program_for_any_sizes():
    inputs = EVERYTHING.inputs()
    torch.compiler.reset()
    actual = torch.compile(paged_attention, backend="eager", fullgraph=True, dynamic=True)(**inputs)
    for result, expected in zip(actual, paged_attention(**inputs), strict=True):
        assert result.equal(expected)
