# Keyword arguments are built in dicts of mixed values.
# pyright: reportArgumentType=false, reportCallIssue=false

"""The reference of paged attention against the float64 oracle, and both against PyTorch's own attention."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flashlatte import paged_attention
from flashlatte.testing.compare import Tolerance, assert_accurate, assert_close
from flashlatte.testing.paged_attention_case import PagedAttentionCase
from flashlatte.testing.paged_attention_oracle import paged_attention as oracle

F32 = torch.float32
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
TOY = PagedAttentionCase(2, 5, 9, 4, 2, head_dim=16, d_v=16, page_size=4, varlen=True)
EXACT = replace(TOY, dtype=F32)
FLOAT32 = Tolerance(1e-5, 1e-4, 1e-9)


def check(case, **more):
    arguments = case.inputs() | more
    out, lse = paged_attention(**arguments, backend="reference")
    expected, expected_lse = oracle(**arguments)
    if case.fp8_out:
        error = (out.float().double() - expected.clamp(-448, 448)).abs()
        assert (error <= expected.abs() / 16 * 1.001 + 2.0**-10).all()
    elif case.dtype == F32:
        assert_close(out, expected, FLOAT32, "out")
    else:
        assert_accurate(out, expected, oracle(**arguments, dtype=torch.bfloat16)[0], "out")
    assert_close(lse, expected_lse, Tolerance(1e-4, 1e-5), "lse")


@given(
    batch=st.integers(1, 3),
    s_q=st.integers(1, 7),
    context=st.integers(0, 17),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    widths=st.sampled_from([(16, 16), (8, 24), (24, 5)]),
    page_size=st.integers(1, 9),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 4, (2, 1), (-1, 2), (3, -1)]),
    new_keys=st.booleans(),
    softcap=st.sampled_from([0.0, 2.0]),
    prefix_ranges=st.integers(0, 2),
    qq_bias=st.sampled_from([0, 3]),
    sinks=st.booleans(),
    alibi=st.sampled_from(["none", "linear", "sqrt"]),
    layout=st.sampled_from(["nhd", "hnd", "split"]),
    zero_lengths=st.booleans(),
    decodes=st.integers(0, 2),
    unowned=st.integers(0, 2),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**32),
)
def test_float32_against_the_oracle(heads, widths, layout, **fields):
    if layout == "split":
        widths = (16, widths[1])
    check(
        PagedAttentionCase(
            h_q=heads[0],
            h_kv=heads[1],
            head_dim=widths[0],
            d_v=widths[1],
            varlen=True,
            dtype=F32,
            layout=layout,
            **fields,
        )
    )


@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2, INT8])
@pytest.mark.parametrize("scale_kind", ["number", "tensor", "head", "token"])
def test_quantized_caches(cache_dtype, scale_kind):
    check(replace(EXACT, cache_dtype=cache_dtype, scale_kind=scale_kind, window=6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    check(replace(TOY, dtype=dtype, strided=True))


def test_fp8_output():
    check(replace(EXACT, fp8_out=True))
    check(replace(EXACT, fp8_out=True), out_scale=1e-4)  # saturates
    arguments = EXACT.inputs()
    out = torch.empty(*arguments["q"].shape[:2], 16, dtype=E4M3)
    assert paged_attention(**arguments, out=out)[0] is out
    scaled, _ = paged_attention(**arguments, out_scale=torch.ones(1))
    assert out.view(torch.uint8).equal(scaled.view(torch.uint8))


@pytest.mark.parametrize("empty_lse", [math.inf, -math.inf])
def test_queries_without_keys(empty_lse):
    case = replace(EXACT, batch=2, s_q=5, varlen=False, s_k=3, sinks=True, unowned=2)
    arguments = case.inputs() | {"empty_lse": empty_lse}
    out, lse = paged_attention(**arguments)
    for rows in (slice(0, 4), slice(7, 9), slice(12, 14)):  # outside of requests, and before the first key
        assert out[rows].eq(0).all()
        assert lse[rows].eq(empty_lse).all()
    check(case, empty_lse=empty_lse)


def test_pages_and_lengths_of_any_value():
    case = replace(EXACT, batch=3, varlen=False, index_dtype=torch.int64)
    arguments = case.inputs()
    table, lengths = arguments["block_table"], arguments["seqused_k"]
    table[0, 1], table[1, 0], lengths[1], lengths[2] = -1, 2**40, 2**62, -(2**62)
    caches = {name: arguments[name].nan_to_num(0.5) for name in ("k_cache", "v_cache")}
    check(case, block_table=table, seqused_k=lengths, **caches)


def test_pages_that_a_window_has_left_may_hold_anything():
    case = replace(EXACT, context=20, varlen=False, window=4)
    arguments = case.inputs()
    expected = paged_attention(**arguments)
    for request in range(2):
        arguments["k_cache"][arguments["block_table"][request, :4].long()] = torch.nan
        arguments["v_cache"][arguments["block_table"][request, :4].long()] = torch.nan
    for result, wanted in zip(paged_attention(**arguments), expected, strict=True):
        assert result.equal(wanted)


def test_new_keys_beside_the_cache_are_as_those_in_it():
    case = replace(EXACT, varlen=False, causal=True)
    arguments = case.inputs()
    expected = paged_attention(**arguments)
    rows = {}
    for name in ("k", "v"):
        cache, pages = arguments[f"{name}_cache"], arguments["block_table"].long()
        rows[name] = cache[pages].flatten(1, 2)[:, 9:14].flatten(0, 1)  # the last 5 of 14
    arguments["seqused_k"] -= 5
    for result, wanted in zip(paged_attention(**arguments, **rows), expected, strict=True):
        torch.testing.assert_close(result, wanted)


def gathered(arguments):
    """q, k and v [1, h, s, d] of the first request, and its context."""
    end, length = int(arguments["cu_seqlens_q"][1]), int(arguments["seqused_k"][0])
    pages = arguments["block_table"][0].long()
    pages = pages[: -(-length // arguments["k_cache"].shape[1])]
    rows = [arguments[f"{name}_cache"][pages].flatten(0, 1)[:length].transpose(0, 1)[None] for name in ("k", "v")]
    return arguments["q"][:end].transpose(0, 1)[None], *rows, length - end


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("alibi", [pytest.param("none", marks=pytest.mark.full), "linear"])
@pytest.mark.parametrize("window", [None, 5])
def test_flex_attention_agrees(softcap, alibi, window):
    case = replace(EXACT, batch=1, varlen=False, softcap=softcap, alibi=alibi, window=window)
    arguments = case.inputs() | {"prefix_ranges": torch.tensor([[[2, 6], [10, 12]]])}
    q, k, v, context = gathered(arguments)
    slopes = arguments.get("alibi_slopes")

    def score(value, _batch, head, query, key):
        value = softcap * torch.tanh(value / softcap) if softcap else value
        return value if slopes is None else value - slopes[head] * (query + context - key).abs()

    def visible(_batch, _head, query, key):
        position = query + context
        seen = (key <= position) & (position - key < (window or 1000))
        for first, last in ((2, 6), (10, 12)):
            seen = seen | ((position >= first) & (position <= last) & (key >= first) & (key <= last))
        return seen

    mask = create_block_mask(visible, None, None, q.shape[2], k.shape[2], device="cpu")
    expected = flex_attention(q, k, v, score_mod=score, block_mask=mask, enable_gqa=True)
    out, _ = paged_attention(**arguments)
    torch.testing.assert_close(out, expected[0].transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_sdpa_agrees():
    arguments = replace(EXACT, batch=1, varlen=False, context=0, head_dim=32, h_q=6).inputs()
    q, k, v, _ = gathered(arguments)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(paged_attention(**arguments)[0], expected[0].transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_vllms_layout_of_keys_in_pieces():
    """A worked example: key_cache [pages, heads, d / x, page_size, x] with x = 16 bytes."""
    key_cache = torch.zeros(2, 1, 2, 4, 4)
    value_cache = torch.zeros(2, 1, 3, 4)
    key_cache[1, 0, 1, 2, 3] = 8.0  # number 7 of the key at offset 2 of page 1
    value_cache[1, 0, :, 2] = torch.tensor([1.0, 2.0, 3.0])
    q = torch.zeros(1, 1, 8)
    q[0, 0, 7] = 100.0
    out, _ = paged_attention(
        q,
        key_cache.permute(0, 3, 1, 2, 4),
        value_cache.permute(0, 3, 1, 2),
        torch.tensor([[1]]),
        torch.tensor([3]),
        torch.tensor([0, 1]),
    )
    assert out[0, 0].tolist() == [1.0, 2.0, 3.0]


def test_a_tree_of_drafts():
    """Two drafts after one token: each attends to the context, the root and itself."""
    case = replace(EXACT, batch=1, s_q=3, varlen=False, h_q=2, h_kv=2)
    bias = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, -math.inf, 0.0]])
    arguments = case.inputs()
    out, _ = paged_attention(**arguments, qq_bias=bias)
    q, k, v, context = gathered(arguments)
    keys = [*range(context), context, context + 2]
    scores = torch.einsum("hd,hnd->hn", q[0, :, 2], k[0][:, keys]) / 4
    torch.testing.assert_close(out[2], torch.einsum("hn,hnd->hd", scores.softmax(-1), v[0][:, keys]))


def test_given_outputs_are_written():
    arguments = TOY.inputs()
    tokens = arguments["q"].shape[0]
    out = torch.full((tokens, 6, 20), torch.nan, dtype=torch.bfloat16)[:, 1:5, :16]
    lse = torch.full((tokens, 8), torch.nan)[:, ::2]
    results = paged_attention(**arguments, out=out, lse=lse)
    assert results[0] is out
    assert results[1] is lse
    for result, expected in zip(results, paged_attention(**arguments), strict=True):
        assert result.equal(expected)


def test_no_tokens():
    cache = torch.zeros(2, 4, 1, 8)
    out, lse = paged_attention(
        torch.zeros(0, 2, 8), cache, cache, torch.zeros(0, 0).int(), torch.zeros(0).int(), torch.zeros(1).int()
    )
    assert out.shape == (0, 2, 8)
    assert lse.shape == (0, 2)
