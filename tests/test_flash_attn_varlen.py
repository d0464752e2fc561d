"""FlashMLA's functions for prompts of varying lengths, whole and packed."""

# pyright: reportArgumentType=false, reportCallIssue=false

import math

import pytest
import torch
from support.flash_mla_calls import assert_same

from flashlatte import dense_prefill, flash_mla

LENGTHS = torch.tensor([0, 5, 5, 9], dtype=torch.int32), torch.tensor([0, 7, 9, 9], dtype=torch.int32)


def prefill_rows(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(9, heads, width, generator=generator).to(dtype) for heads, width in ((4, 24), (2, 24), (2, 16))]


def test_varlen_attention_by_position():
    q, k, v = prefill_rows()
    results = flash_mla.flash_attn_varlen_func(q, k, v, *LENGTHS, 5, 7, 0.0, 0.2, True, True, True)
    assert_same(results, dense_prefill(q, k, v, *LENGTHS, 5, 7, softmax_scale=0.2, causal=True, deterministic=True))
    out, lse = results
    assert lse.stride() == (1, 9)
    # The third request has no key.
    assert out[5:].eq(0).all()
    assert lse[5:].eq(-math.inf).all()


def test_packed_varlen_attention_is_that_of_its_parts():
    q, k, v = prefill_rows()
    k, v = k.repeat(1, 2, 1), v.repeat(1, 2, 1)
    cu_seqlens = LENGTHS[0]
    expected = flash_mla.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 5, 5, causal=True)
    qkv = torch.cat((q, k, v), dim=-1)
    assert_same(flash_mla.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 5, 24, causal=True), expected)
    kv = torch.cat((k, v), dim=-1)
    packed = flash_mla.flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, cu_seqlens, 5, 5, 24, causal=True)
    assert_same(packed, expected)


def test_varlen_attention_has_gradients_for_grouped_heads_and_packed_tensors():
    q, k, v = (x.requires_grad_() for x in prefill_rows())
    kv = torch.cat((k, v), dim=-1).detach().requires_grad_()
    out, _ = flash_mla.flash_attn_varlen_func(q, k, v, *LENGTHS, 5, 7, causal=True)
    expected = torch.autograd.grad(out.square().sum(), (q, k, v))
    out, _ = flash_mla.flash_attn_varlen_kvpacked_func(q, kv, *LENGTHS, 5, 7, 24, causal=True)
    dq, dkv = torch.autograd.grad(out.square().sum(), (q, kv))
    assert dq.equal(expected[0])
    assert dkv.equal(torch.cat(expected[1:], dim=-1))
    assert expected[1].abs().sum() > 0


def test_equal_lengths_need_no_cu_seqlens():
    q, k, v = prefill_rows()
    equal = torch.tensor([0, 3, 6, 9])
    results = flash_mla.flash_attn_varlen_func(q, k, v, *LENGTHS, 3, 3, is_varlen=False)
    assert_same(results, flash_mla.flash_attn_varlen_func(q, k, v, equal, equal, 3, 3))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dropout_p": 0.1}, ValueError, "^dropout_p must be 0, as there is no dropout, got 0.1$"),
        ({"cu_seqlens_qo": torch.tensor([0, 5, 9])}, ValueError, r"^cu_seqlens_kv must have shape \[3\]"),
        ({"cu_seqlens_kv": torch.tensor([0, 5, 4, 9])}, ValueError, "^cu_seqlens_kv must not decrease"),
        ({"max_seqlen_qo": -1}, ValueError, "^max_seqlen_qo must be at least 0, got -1$"),
        ({"is_varlen": 0}, TypeError, "^is_varlen must be True or False"),
        ({"is_varlen": False, "q": torch.zeros(8, 4, 24)}, ValueError, "^q must have equally many tokens for each"),
    ],
)
def test_wrong_arguments_of_varlen_attention(change, error, message):
    arguments = dict(zip(("q", "k", "v", "cu_seqlens_qo", "cu_seqlens_kv"), (*prefill_rows(), *LENGTHS), strict=True))
    arguments |= {"max_seqlen_qo": 5, "max_seqlen_kv": 7}
    with pytest.raises(error, match=message):
        flash_mla.flash_attn_varlen_func(**(arguments | change))


def test_wrong_packed_tensors():
    with pytest.raises(ValueError, match=r"^qkv must have shape .* more than 48 wide, got \[9, 4, 48\]$"):
        flash_mla.flash_attn_varlen_qkvpacked_func(torch.zeros(9, 4, 48), LENGTHS[0], 5, 24)
    with pytest.raises(TypeError, match=r"^kv must be a tensor, got list$"):
        flash_mla.flash_attn_varlen_kvpacked_func(torch.zeros(9, 4, 24), [], *LENGTHS, 5, 7, 24)
    with pytest.raises(ValueError, match=r"^cu_seqlens must not decrease"):
        flash_mla.flash_attn_varlen_qkvpacked_func(torch.zeros(9, 4, 56), torch.tensor([0, 6, 4]), 5, 24)
    with pytest.raises(TypeError, match=r"^qkv must be .*, got int32$"):
        flash_mla.flash_attn_varlen_qkvpacked_func(torch.zeros(9, 4, 56).int(), LENGTHS[0], 5, 24)
    with pytest.raises(TypeError, match=r"^kv must be float32, got float16$"):
        flash_mla.flash_attn_varlen_kvpacked_func(
            torch.zeros(9, 4, 24), torch.zeros(9, 4, 32).half(), *LENGTHS, 5, 7, 24
        )
