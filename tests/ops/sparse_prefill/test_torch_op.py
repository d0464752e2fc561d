from dataclasses import replace

import pytest
import torch
from support.torch_op import assert_compiles, opcheck

from flashlatte import sparse_prefill
from flashlatte.ops.sparse_prefill import api
from flashlatte.testing.cases import SparsePrefillCase

CASE = SparsePrefillCase(5, 20, 4, 8, head_dim=24, d_v=16)
PLAIN = replace(CASE, attn_sink=False, strided=True)


def test_opcheck():
    opcheck(api, "sparse_prefill", lambda: sparse_prefill(**PLAIN.inputs()))


def test_opcheck_with_all_arguments():
    opcheck(api, "sparse_prefill", lambda: sparse_prefill(**replace(CASE, topk_lengths=True).inputs()))


@pytest.mark.full
def test_compile():
    cases = [case.inputs() for case in (CASE, replace(CASE, s_q=7, topk=9), replace(PLAIN, topk_lengths=True))]
    assert_compiles(sparse_prefill, *cases, cases[0] | {"out": torch.empty(5, 4, 16, dtype=torch.bfloat16)})
