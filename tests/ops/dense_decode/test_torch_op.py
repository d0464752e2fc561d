import math
from dataclasses import replace

import pytest
import torch
from support.torch_op import assert_compiles, opcheck

from flashlatte import dense_decode
from flashlatte.ops.dense_decode import api
from flashlatte.testing.cases import DenseDecodeCase

CASE = DenseDecodeCase(2, 2, 20, 4, h_kv=2, head_dim=24, head_dim_v=16, page_size=7, causal=True, zero_lengths=True)
FP8 = replace(CASE, cache_dtype=torch.float8_e4m3fn)


def test_opcheck():
    opcheck(api, "dense_decode", lambda: dense_decode(**CASE.inputs()))
    opcheck(api, "dense_decode", lambda: dense_decode(**replace(CASE, separate_rope=True).inputs()))


def test_compile():
    cases = [replace(CASE, batch=batch, s_k=s_k).inputs() for batch, s_k in ((2, 20), (3, 33), (5, 40))]
    outputs = {"out": torch.empty(2, 2, 4, 16, dtype=torch.bfloat16), "lse": torch.empty(2, 4, 2)}
    cases.append(replace(CASE, separate_rope=True).inputs())
    assert_compiles(dense_decode, *cases, FP8.inputs(), FP8.inputs() | {"k_scale": torch.ones(1)}, cases[0] | outputs)


@pytest.mark.full
def test_compile_with_numbers_that_change():
    numbers = [
        {"softmax_scale": scale, "empty_lse": empty} for scale in (0.1, 0.2, 0.3) for empty in (math.inf, -math.inf)
    ]
    assert_compiles(dense_decode, *(CASE.inputs() | changed for changed in numbers))
