"""``BatchPrefillWithRaggedKVCacheWrapper`` against float64."""

# Dicts of arguments are unpacked, and results are a tensor or a pair.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.flashinfer_calls import WORKSPACE

from flashlatte.flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper
from flashlatte.testing import compare, oracles
from flashlatte.testing.compare import assert_close

HEADS, QK, VO = 4, 24, 16
LENGTHS = st.lists(st.integers(0, 9), min_size=3, max_size=3)


def boundaries(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def tensors(queries, keys, kv_heads=HEADS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((sum(queries), HEADS, QK), (sum(keys), kv_heads, QK), (sum(keys), kv_heads, VO))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def planned(wrapper, queries, keys, kv_heads=HEADS, **options):
    dims = (HEADS, kv_heads, QK, VO)
    wrapper.plan(boundaries(queries), boundaries(keys), *dims, **{"q_data_type": torch.float32} | options)
    return wrapper


def assert_results(results, inputs, queries, keys, **options):
    expected = oracles.dense_prefill(*inputs, boundaries(queries), boundaries(keys), max(queries), max(keys), **options)
    assert_close(results[0], expected[0], compare.FLOAT32, "out")
    assert_close(results[1], expected[1] * math.log2(math.e), compare.FLOAT32, "lse")


@given(
    queries=LENGTHS,
    keys=LENGTHS,
    causal=st.booleans(),
    window=st.sampled_from([-1, 0, 3]),
    kv_heads=st.sampled_from([1, 2, 4]),
    heads_first=st.booleans(),
    scale=st.sampled_from([None, 0.1]),
)
def test_requests_against_the_oracle(queries, keys, causal, window, kv_heads, heads_first, scale):
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "HND" if heads_first else "NHD")
    options = {"causal": causal, "window_left": window, "sm_scale": scale}
    planned(wrapper, queries, keys, kv_heads, **options)
    inputs = tensors(queries, keys, kv_heads)
    q, *key_values = inputs
    laid_out = [x.transpose(0, 1).contiguous() for x in key_values] if heads_first else key_values
    results = wrapper.run_return_lse(q, *laid_out)
    assert results[1].is_contiguous()
    side = None if window < 0 else (window, -1)
    assert_results(results, inputs, queries, keys, causal=causal, window=side, softmax_scale=scale)


def test_graph_mode_reads_the_buffers():
    """A captured ``run`` reads the buffers, to which later plans copy."""
    buffers = [torch.zeros(3, dtype=torch.int32) for _ in range(2)]
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers)
    assert wrapper.is_cuda_graph_enabled
    for queries, keys in (([3, 4], [5, 2]), ([7, 0], [1, 6])):
        planned(wrapper, queries, keys, causal=True)
        assert [buffer.tolist() for buffer in buffers] == [boundaries(queries).tolist(), boundaries(keys).tolist()]
        assert all(used is buffer for used, buffer in zip(wrapper._boundaries, buffers, strict=True))
        inputs = tensors(queries, keys)
        out, lse = torch.empty(7, HEADS, VO), torch.empty(7, HEADS)
        assert wrapper.run(*inputs, out=out, lse=lse) is out
        assert_results((out, lse), inputs, queries, keys, causal=True)
    with pytest.raises(ValueError, match="qo_indptr must have the 2 requests of qo_indptr_buf, got 3"):
        planned(wrapper, [1, 1, 1], [1, 1, 1])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("base", ["log2", "ln"])
def test_base_and_layout_of_lse(base, in_place):
    wrapper = planned(BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE), [3, 0], [4, 2], uniform_q_len=3)
    inputs = tensors([3, 0], [4, 2])
    _, usual = wrapper.run(*inputs, return_lse=True)
    buffer = torch.empty(HEADS, 3) if in_place else None
    _, lse = wrapper.run(*inputs, return_lse=True, lse=buffer, lse_base=base, lse_layout="HN")
    assert lse.shape == (HEADS, 3)
    assert lse.is_contiguous()
    assert buffer is None or lse is buffer
    torch.testing.assert_close(lse.T, usual * (1 if base == "log2" else math.log(2)))
    with pytest.raises(ValueError, match=r"^lse must have shape \[4, 3\]"):
        wrapper.run(*inputs, lse=torch.empty(3, HEADS), lse_layout="HN")
    with pytest.raises(ValueError, match=r"^lse_base must be one of log2, ln, got 'log10'"):
        wrapper.run(*inputs, lse_base="log10")
    with pytest.raises(ValueError, match=r"^lse_layout must be one of NH, HN, got 'TH'"):
        wrapper.run(*inputs, lse_layout="TH")


def test_names_of_dtypes():
    wrapper = planned(BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE), [3], [4], q_data_type="bfloat16")
    inputs = [x.bfloat16() for x in tensors([3], [4])]
    assert wrapper.run(*inputs).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="q must be bfloat16, got float32"):
        wrapper.run(*tensors([3], [4]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"custom_mask": torch.ones(12, dtype=torch.bool)}, r"custom_mask must be left out, got a tensor \[12\]"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode must be one of NONE"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap must be left out, got 30.0: dense_prefill has no soft cap"),
        (
            {"kv_data_type": torch.bfloat16},
            "kv_data_type must be q_data_type torch.float32 or None, got torch.bfloat16",
        ),
        ({"v_indptr": torch.zeros(2)}, "v_indptr must be left out"),
        ({"use_token_head_sf": True}, "use_token_head_sf must be left out, got True: keys have no scales"),
        ({"token_pos_in_items_len": 3}, "token_pos_in_items_len must be left out, got 3"),
    ],
)
def test_refusals_of_a_plan(change, message):
    with pytest.raises(ValueError, match=message):
        planned(BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE), [3], [4], **change)


@pytest.mark.parametrize(
    ("place", "name"), list(enumerate(("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo")))
)
@pytest.mark.parametrize("value", ["8", True, 8.0])
def test_sizes_are_ints(place, name, value):
    sizes = [HEADS, HEADS, QK, VO]
    sizes[place] = value
    with pytest.raises(TypeError, match=f"^{name} must be an int, got"):
        BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE).plan(boundaries([3]), boundaries([4]), *sizes)


def test_other_refusals():
    with pytest.raises(ValueError, match="jit_args must be left out"):
        BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, jit_args=["name"])
    with pytest.raises(ValueError, match="variant_owns_mask must be left out, got True"):
        BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, variant_owns_mask=True)
    with pytest.raises(TypeError, match="qo_indptr_buf must be a tensor"):
        BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, use_cuda_graph=True)
    wrapper, inputs = BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE), tensors([3], [4])
    with pytest.raises(ValueError, match="plan must be called before run"):
        wrapper.run(*inputs)
    planned(wrapper, [3], [4])
    with pytest.raises(ValueError, match="q must have the 3 tokens of qo_indptr, got 2"):
        wrapper.run(inputs[0][:2], *inputs[1:])
    with pytest.raises(ValueError, match=r"k_scale must be left out, got 0\.5: inputs have no scales"):
        wrapper.run(*inputs, q_scale=1.0, k_scale=0.5)
    with pytest.raises(ValueError, match=r"^v_scale must be left out, got a tensor \[4\]: inputs have no scales"):
        wrapper.run(*inputs, v_scale=torch.ones(4))
    with pytest.raises(TypeError, match=r"^return_lse must be True or False, got 'x'$"):
        wrapper.run(*inputs, return_lse="x")
    with pytest.raises(ValueError, match="args must be left out"):
        wrapper.run(*inputs, 3)
