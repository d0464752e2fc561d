"""The FlashMLA drop-in on generated calls, compared with float64."""

import math
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.flash_mla_calls import decode

from flashlatte import flash_mla
from flashlatte.testing import oracles
from flashlatte.testing.cases import DenseDecodeCase, DensePrefillCase, SparseDecodeCase, SparsePrefillCase
from flashlatte.testing.compare import FLOAT32, Tolerance, assert_close

FLOATS = st.sampled_from([(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")])
COMMON = {
    "batch": st.integers(1, 3),
    "s_q": st.integers(1, 3),
    "s_k": st.integers(1, 40),
    "h_q": st.sampled_from([1, 4]),
    "page_size": st.sampled_from([1, 5, 16]),
    "varlen": st.booleans(),
    "zero_lengths": st.booleans(),
    "strided": st.booleans(),
    "softmax_scale": st.sampled_from([None, 0.03]),
    "index_dtype": st.sampled_from([torch.int32, torch.int64]),
    "seed": st.integers(0, 2**32),
}


@given(case=st.builds(DenseDecodeCase, **COMMON, causal=st.booleans()), kind=FLOATS)
def test_dense_decode_against_the_oracle(case, kind):
    inputs = replace(case, dtype=kind[0]).inputs()
    assert_near(decode(inputs, backend="reference"), oracles.dense_decode(**inputs, empty_lse=math.inf), kind[0])


@given(
    case=st.builds(
        SparseDecodeCase,
        **COMMON,
        topk=st.integers(1, 20),
        head_dim=st.sampled_from([512, 576]),
        extra_topk=st.sampled_from([0, 6]),
        extra_s_k=st.integers(1, 9),
        extra_page_size=st.integers(1, 4),
        topk_lengths=st.sampled_from(["all", "request", "token"]),
        extra_topk_lengths=st.sampled_from(["all", "request", "token"]),
        attn_sink=st.booleans(),
        empty_rows=st.sampled_from([0.0, 0.5]),
    ),
    kind=FLOATS,
    scaled=st.sampled_from([None, "v32", "model1"]),
)
def test_sparse_decode_against_the_oracle(case, kind, scaled):
    case = replace(case, dtype=kind[0], cache_format=scaled or kind[1], head_dim=None if scaled else case.head_dim)
    inputs = case.inputs()
    assert_near(decode(inputs, backend="reference"), oracles.sparse_decode(**inputs, empty_lse=math.inf), kind[0])


@given(
    case=st.builds(
        SparsePrefillCase,
        **{name: COMMON[name] for name in ("s_q", "h_q", "strided", "index_dtype", "seed")},
        s_kv=st.integers(1, 60),
        topk=st.integers(1, 30),
        head_dim=st.sampled_from([512, 576]),
        topk_lengths=st.booleans(),
        attn_sink=st.booleans(),
        empty_rows=st.sampled_from([0.0, 0.5]),
        softmax_scale=st.sampled_from([0.03, 0.5]),
    ),
    kind=FLOATS,
)
def test_sparse_prefill_against_the_oracle(case, kind):
    inputs = replace(case, dtype=kind[0]).inputs()
    renamed = {("sm_scale" if name == "softmax_scale" else name): value for name, value in inputs.items()}
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(**renamed, backend="reference")
    expected, expected_max, expected_lse = oracles.sparse_prefill(**inputs, empty_lse=math.inf)
    assert_near((out, lse), (expected, expected_lse), kind[0])
    assert_close(max_logits, expected_max, FLOAT32)


@given(
    case=st.builds(
        DensePrefillCase,
        batch=st.integers(1, 3),
        s_q=st.integers(1, 20),
        s_k=st.integers(1, 20),
        h_q=st.sampled_from([2, 4]),
        h_kv=st.sampled_from([1, 2]),
        head_dim=st.sampled_from([24, 192]),
        causal=st.booleans(),
        varlen=st.booleans(),
        zero_lengths=st.booleans(),
        strided=st.booleans(),
        seed=st.integers(0, 2**32),
    ),
    kind=FLOATS,
)
def test_varlen_attention_against_the_oracle(case, kind):
    inputs = replace(case, dtype=kind[0]).inputs()
    expected = oracles.dense_prefill(**inputs)
    del inputs["window"]
    for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
        inputs[name.replace("_q", "_qo").replace("_k", "_kv")] = inputs.pop(name)
    assert_near(flash_mla.flash_attn_varlen_func(**inputs, backend="reference"), expected, kind[0])


def assert_near(results, expected, dtype):
    """out within float32 accuracy and one rounding to ``dtype``, lse within float32 accuracy."""
    (out, lse), (expected_out, expected_lse) = results, expected
    assert out.dtype == dtype
    assert_close(lse, expected_lse, FLOAT32)
    assert_close(out, expected_out, Tolerance(2e-6, FLOAT32.rel + torch.finfo(dtype).eps, 1e-4))
