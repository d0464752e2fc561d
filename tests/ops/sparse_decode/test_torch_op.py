# Keyword arguments are built in dicts of mixed values.
# pyright: reportArgumentType=false

from dataclasses import replace

import pytest
import torch
from support.torch_op import assert_compiles, opcheck

from flashlatte import sparse_decode
from flashlatte.ops.sparse_decode import api
from flashlatte.testing.cases import SparseDecodeCase

PLAIN = SparseDecodeCase(2, 2, 20, 4, 8, cache_format="bf16", head_dim=24, head_dim_v=16, page_size=7, attn_sink=False)
V32 = SparseDecodeCase(2, 2, 20, 4, 8, cache_format="v32", topk_lengths="request")
MODEL1 = replace(
    V32, cache_format="model1", extra_topk=3, extra_s_k=5, topk_lengths="token", extra_topk_lengths="request"
)


def inputs(case):
    """Inputs with the format given by name, since a dataclass cannot be an argument of a compiled function."""
    return case.inputs() | {"cache_format": case.cache_format}


def test_opcheck():
    opcheck(api, "sparse_decode", lambda: sparse_decode(**inputs(PLAIN)))


def test_opcheck_with_all_arguments():
    opcheck(api, "sparse_decode", lambda: sparse_decode(**inputs(MODEL1)))


@pytest.mark.full
def test_compile():
    outputs = {"out": torch.empty(2, 2, 4, 16, dtype=torch.bfloat16), "lse": torch.empty(2, 4, 2)}
    inferred = inputs(MODEL1) | {"cache_format": None}
    plain = inputs(PLAIN)
    assert_compiles(
        sparse_decode, plain, inputs(replace(PLAIN, batch=3, topk=5)), plain | outputs, inputs(V32), inferred
    )
