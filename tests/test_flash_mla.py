# Keyword arguments are put together in dicts of mixed values, positional ones in sequences of any length.
# pyright: reportArgumentType=false, reportCallIssue=false

import importlib
import inspect
import math
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import dense_decode, dense_prefill, flash_mla, kv_cache, sparse_decode, sparse_prefill
from flashlatte.testing import oracles
from flashlatte.testing.cases import DenseDecodeCase, DensePrefillCase, SparseDecodeCase, SparsePrefillCase
from flashlatte.testing.compare import DECODE_LSE, DENSE_DECODE_OUT, FLOAT32, Tolerance, assert_close

DENSE = DenseDecodeCase(3, 2, 100, 4, varlen=True, causal=True, seed=1)
SPARSE = SparseDecodeCase(
    2, 2, 90, 4, 64, extra_topk=20, extra_s_k=30, topk_lengths="request", extra_topk_lengths="request"
)
PREFILL = SparsePrefillCase(5, 90, 4, 64, topk_lengths=True, empty_rows=0.3)
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def decode(inputs, **changes):
    """Dense or sparse decode with these arguments of flashlatte's operation, by FlashMLA's names."""
    schedule, num_splits = flash_mla.get_mla_metadata()
    arguments = {
        "q": inputs["q"],
        "k_cache": inputs["k_cache"],
        "block_table": inputs.get("block_table"),
        "cache_seqlens": inputs.get("cache_seqlens"),
        "head_dim_v": inputs["head_dim_v"],
        "tile_scheduler_metadata": schedule,
        "num_splits": num_splits,
        "softmax_scale": inputs["softmax_scale"],
        "causal": inputs.get("causal", False),
        "is_fp8_kvcache": inputs["k_cache"].dtype.itemsize == 1,
        "indices": inputs.get("indices"),
        "attn_sink": inputs.get("attn_sink"),
        "extra_k_cache": inputs.get("extra_k_cache"),
        "extra_indices_in_kvcache": inputs.get("extra_indices"),
        "topk_length": inputs.get("topk_length"),
        "extra_topk_length": inputs.get("extra_topk_length"),
    }
    return flash_mla.flash_mla_with_kvcache(**(arguments | changes))


def fp4_beside_fp8():
    """DeepSeek-V4.1's two caches, and the same numbers in bf16."""
    inputs = replace(SPARSE, cache_format="v41", attn_sink=True).inputs()
    rows = torch.randn(*inputs["extra_k_cache"].shape[:2], 1, 512, generator=torch.Generator().manual_seed(0))
    inputs["extra_k_cache"] = kv_cache.pack(rows, "v41_fp4")
    plain = inputs | {"cache_format": None}
    for name in ("k_cache", "extra_k_cache"):
        plain[name] = kv_cache.unpack(inputs[name])
    return inputs, plain


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("says_fp8", [False, True])
def test_the_caches_of_v41(dtype, says_fp8):
    inputs, plain = fp4_beside_fp8()
    caches = {name: inputs[name].view(dtype) for name in ("k_cache", "extra_k_cache")}
    results = decode(inputs | caches, is_fp8_kvcache=says_fp8, backend="reference")
    expected = sparse_decode(**plain, backend="reference", empty_lse=math.inf)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted)


def test_only_v41_takes_another_format_beside_it():
    inputs, _ = fp4_beside_fp8()
    v32 = SPARSE.inputs() | {"extra_k_cache": inputs["extra_k_cache"]}
    with pytest.raises(ValueError, match=r"^extra_k_cache of format v32 must be 656 wide, got 288$"):
        decode(v32)


def assert_same(results, expected):
    for result, wanted in zip(results, expected, strict=True):
        assert result.equal(wanted)
        assert result.stride() == wanted.stride()


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (
            "flash_mla_with_kvcache",
            "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale causal "
            "is_fp8_kvcache indices attn_sink extra_k_cache extra_indices_in_kvcache topk_length extra_topk_length",
        ),
        ("flash_mla_sparse_fwd", "q kv indices sm_scale d_v attn_sink topk_length"),
        (
            "flash_attn_varlen_func",
            "q k v cu_seqlens_qo cu_seqlens_kv max_seqlen_qo max_seqlen_kv dropout_p softmax_scale causal "
            "deterministic is_varlen",
        ),
        (
            "flash_attn_varlen_qkvpacked_func",
            "qkv cu_seqlens max_seqlen head_dim_qk dropout_p softmax_scale causal deterministic is_varlen",
        ),
        (
            "flash_attn_varlen_kvpacked_func",
            "q kv cu_seqlens_qo cu_seqlens_kv max_seqlen_qo max_seqlen_kv head_dim_qk dropout_p softmax_scale causal "
            "deterministic is_varlen",
        ),
    ],
)
def test_positional_arguments_are_flash_mlas_in_its_order(function, names):
    parameters = inspect.signature(getattr(flash_mla, function)).parameters.values()
    assert [parameter.name for parameter in parameters if parameter.kind is POSITIONAL] == names.split()
    assert function in flash_mla.__all__


def test_get_mla_metadata_takes_anything():
    schedule, num_splits = flash_mla.get_mla_metadata(torch.ones(3), 128, 1, num_heads=128, is_fp8=True)
    assert isinstance(schedule, flash_mla.FlashMLASchedMeta)
    assert num_splits is None
    fields = (schedule.have_initialized, schedule.config, schedule.tile_scheduler_metadata, schedule.num_splits)
    assert fields == (False, None, None, None)


def test_dense_decode_by_position():
    inputs = DENSE.inputs()
    schedule, num_splits = flash_mla.get_mla_metadata()
    tensors = (inputs[name] for name in ("q", "k_cache", "block_table", "cache_seqlens"))
    results = flash_mla.flash_mla_with_kvcache(*tensors, 512, schedule, num_splits, 0.05, True, False)
    assert_same(results, dense_decode(**(inputs | {"softmax_scale": 0.05})))
    assert results[1].stride() == (8, 1, 4)


def test_sparse_decode_by_position():
    inputs = SPARSE.inputs()
    schedule, num_splits = flash_mla.get_mla_metadata()
    names = ("indices", "attn_sink", "extra_k_cache", "extra_indices", "topk_length", "extra_topk_length")
    results = flash_mla.flash_mla_with_kvcache(
        inputs["q"],
        inputs["k_cache"],
        None,
        None,
        512,
        schedule,
        num_splits,
        inputs["softmax_scale"],
        False,
        True,
        *(inputs.get(name) for name in names),
    )
    assert_same(results, sparse_decode(**inputs, empty_lse=math.inf))


def test_sparse_prefill_by_position():
    inputs = PREFILL.inputs()
    results = flash_mla.flash_mla_sparse_fwd(*inputs.values())
    assert list(inputs) == ["q", "kv", "indices", "softmax_scale", "d_v", "attn_sink", "topk_length"]
    assert_same(results, sparse_prefill(**inputs, empty_lse=math.inf))
    assert results[2].isposinf().any()
    assert results[1][results[2].isposinf()].isneginf().all()


def test_a_row_without_keys_has_lse_plus_inf():
    inputs = DENSE.inputs() | {"cache_seqlens": torch.tensor([0, 1, 100], dtype=torch.int32)}
    out, lse = decode(inputs)
    assert lse[0].isposinf().all()
    assert lse[1, :, 0].isposinf().all()
    assert lse[1, :, 1].isfinite().all()
    assert out[0].eq(0).all()
    assert out[1, 0].eq(0).all()
    out, lse = decode(SparseDecodeCase(2, 2, 90, 4, 64, empty_rows=1.0).inputs())
    assert lse.isposinf().all()
    assert out.eq(0).all()


def test_a_schedule_is_right_for_other_lengths_and_shapes_than_its_first():
    schedule, _ = flash_mla.get_mla_metadata()
    for seed, batch, s_q in ((1, 3, 2), (2, 3, 2), (3, 5, 1)):
        inputs = DenseDecodeCase(batch, s_q, 100, 4, varlen=True, causal=True, seed=seed).inputs()
        out, lse = decode(inputs, tile_scheduler_metadata=schedule)
        expected_out, expected_lse = oracles.dense_decode(**inputs, empty_lse=math.inf)
        assert_close(out, expected_out, DENSE_DECODE_OUT)
        assert_close(lse, expected_lse, DECODE_LSE)
    sparse = SPARSE.inputs()
    assert_same(decode(sparse, tile_scheduler_metadata=schedule), sparse_decode(**sparse, empty_lse=math.inf))


def test_the_default_scale_is_of_the_query_width():
    inputs = DENSE.inputs()
    assert_same(decode(inputs, softmax_scale=None), decode(inputs, softmax_scale=576**-0.5))


def test_dense_decode_over_an_fp8_cache():
    inputs = DenseDecodeCase(3, 1, 100, 4, cache_dtype=torch.float8_e4m3fn).inputs()
    assert_same(decode(inputs, descale_k=0.02), dense_decode(**inputs))


@pytest.mark.parametrize("descale_q", [None, 0.5, torch.tensor([0.5])], ids=["none", "number", "tensor"])
@pytest.mark.parametrize("flag", [False, True])
def test_dense_decode_of_fp8_queries(descale_q, flag):
    """As vLLM and SGLang call it: SGLang without the flag."""
    inputs = DenseDecodeCase(3, 2, 100, 4, cache_dtype=torch.float8_e4m3fn, causal=True).inputs()
    q = (inputs["q"] * 4).to(torch.float8_e4m3fn)
    scales = {"descale_q": descale_q, "descale_k": torch.tensor([0.02])}
    out, lse = decode(inputs, q=q, is_fp8_kvcache=flag, **scales)
    assert out.dtype == torch.bfloat16
    factor = 1.0 if descale_q is None else 0.5
    expected = inputs | {"q": (q.float() * factor).bfloat16(), "k_scale": torch.tensor([0.02])}
    assert_same((out, lse), dense_decode(**expected, empty_lse=math.inf))


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
    names = {"cu_seqlens_q": "cu_seqlens_qo", "cu_seqlens_k": "cu_seqlens_kv", "max_seqlen_q": "max_seqlen_qo",
             "max_seqlen_k": "max_seqlen_kv"}  # fmt: skip
    renamed = {names.get(name, name): value for name, value in inputs.items()}
    assert_near(flash_mla.flash_attn_varlen_func(**renamed, backend="reference"), expected, kind[0])


def assert_near(results, expected, dtype):
    """out within one rounding to ``dtype`` of what float32 keeps, and lse as float32 keeps it."""
    (out, lse), (expected_out, expected_lse) = results, expected
    assert out.dtype == dtype
    assert_close(lse, expected_lse, FLOAT32)
    assert_close(out, expected_out, Tolerance(2e-6, FLOAT32.rel + torch.finfo(dtype).eps, 1e-4))


def test_no_descale_is_for_any_cache():
    inputs = DENSE.inputs()
    assert_same(decode(inputs, descale_q=None, descale_k=None), decode(inputs))


def test_sparse_decode_over_a_bf16_cache_ignores_the_table():
    inputs = SparseDecodeCase(2, 1, 90, 4, 64, cache_format="bf16").inputs()
    expected = sparse_decode(**inputs, empty_lse=math.inf)
    assert_same(decode(inputs, block_table="anything", cache_seqlens=5), expected)


def test_outputs_given_are_returned():
    inputs = DENSE.inputs()
    out, lse = torch.empty(3, 2, 4, 512, dtype=torch.bfloat16), torch.empty(3, 4, 2)
    results = decode(inputs, out=out, lse=lse)
    assert results[0] is out
    assert results[1] is lse
    prefill, prefill_out = PREFILL.inputs(), torch.empty(5, 4, 512, dtype=torch.bfloat16)
    results = flash_mla.flash_mla_sparse_fwd(*prefill.values(), out=prefill_out)
    assert results[0] is prefill_out


SINK, CACHE = torch.zeros(4), SPARSE.inputs()["extra_k_cache"]
FP8_QUERY = DENSE.inputs()["q"].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("case", "change", "error", "message"),
    [
        (
            DENSE,
            {"tile_scheduler_metadata": torch.zeros(1)},
            TypeError,
            "^tile_scheduler_metadata must be the FlashMLA",
        ),
        (DENSE, {"num_splits": torch.zeros(1)}, ValueError, "^num_splits must be None, .* got Tensor$"),
        (DENSE, {"attn_sink": SINK}, ValueError, "^attn_sink belongs to sparse decode and needs indices"),
        (DENSE, {"extra_k_cache": CACHE}, ValueError, "^extra_k_cache belongs to sparse decode and needs indices"),
        (DENSE, {"extra_indices_in_kvcache": SINK}, ValueError, "^extra_indices_in_kvcache belongs to sparse decode"),
        (DENSE, {"topk_length": SINK}, ValueError, "^topk_length belongs to sparse decode and needs indices"),
        (DENSE, {"extra_topk_length": SINK}, ValueError, "^extra_topk_length belongs to sparse decode"),
        (DENSE, {"block_table": None}, ValueError, "^block_table must be given for dense decode .* got None$"),
        (DENSE, {"cache_seqlens": None}, ValueError, "^cache_seqlens must be given for dense decode .* got None$"),
        (DENSE, {"is_fp8_kvcache": True}, ValueError, "^is_fp8_kvcache must .* is True, and k_cache is bfloat16$"),
        (DENSE, {"is_fp8_kvcache": 1}, TypeError, "^is_fp8_kvcache must be True or False, got 1$"),
        (DENSE, {"descale_k": 1.0}, ValueError, "belongs to a float8_e4m3fn k_cache"),
        (DENSE, {"descale_q": 1.0}, ValueError, "^descale_q belongs to a float8_e4m3fn q, and this one is bfloat16$"),
        (DENSE, {"q": None, "descale_q": 1.0}, ValueError, "^descale_q belongs to .*, and this one is NoneType$"),
        (DENSE, {"q": FP8_QUERY, "descale_q": -1.0}, ValueError, "^descale_q must be a finite number above 0, got -1"),
        (DENSE, {"q": FP8_QUERY, "descale_q": SINK}, ValueError, r"^descale_q must hold one value, got shape \[4\]$"),
        (SPARSE, {"causal": True}, ValueError, "^causal must be False in sparse decode .* got True$"),
        (SPARSE, {"causal": 0}, TypeError, "^causal must be True or False, got 0$"),
        (SPARSE, {"is_fp8_kvcache": False}, ValueError, "^is_fp8_kvcache must .* is False, and k_cache is uint8$"),
        (SPARSE, {"descale_k": 1.0}, ValueError, "^descale_k belongs to dense decode over an fp8 cache"),
        (SPARSE, {"descale_q": 1.0}, ValueError, "^descale_q belongs to dense decode over an fp8 cache"),
        (SPARSE, {"extra_indices_in_kvcache": None}, ValueError, "needs extra_indices.* beside it, got None$"),
        (SPARSE, {"extra_k_cache": None}, ValueError, "needs extra_k_cache beside it"),
        (SPARSE, {"num_splits": SINK}, ValueError, "^num_splits must be None"),
    ],
)
def test_contradictions_are_errors(case, change, error, message):
    with pytest.raises(error, match=message):
        decode(case.inputs(), **change)


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
        ({"is_varlen": False, "q": torch.zeros(8, 4, 24)}, ValueError, "^q must have as many tokens for each of 3"),
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


def test_the_alias_forwards_the_top_level_name(tmp_path, monkeypatch):
    assert flash_mla.main(["--install-alias", str(tmp_path)]) == 0
    assert flash_mla.main(["--install-alias", str(tmp_path)]) == 0
    monkeypatch.syspath_prepend(tmp_path)
    names = ("flash_mla", "flash_mla.flash_mla_interface")
    alias, interface = [importlib.import_module(name) for name in names]
    for name in names:
        sys.modules.pop(name)
    assert str(alias.__file__).startswith(str(tmp_path))
    assert all(getattr(alias, name) is getattr(flash_mla, name) for name in flash_mla.__all__)
    assert interface.FlashMLASchedMeta is flash_mla.FlashMLASchedMeta


def test_the_alias_replaces_nobody_elses_package(tmp_path, capsys):
    (tmp_path / "flash_mla").mkdir()
    (tmp_path / "flash_mla" / "__init__.py").write_text("original = True\n")
    assert flash_mla.main(["--install-alias", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "flash_mla" / "__init__.py").read_text() == "original = True\n"
    with pytest.raises(FileExistsError, match=r"was not written by this command"):
        flash_mla.install_alias(tmp_path)


def test_errors_use_flash_mlas_names():
    inputs = SparseDecodeCase(1, 1, 40, 8, 4).inputs()
    metadata, _ = flash_mla.get_mla_metadata()
    q, cache, indices = inputs["q"], inputs["k_cache"], inputs["indices"]
    sparse = (q, cache, None, None, 512, metadata)
    with pytest.raises(ValueError, match=r"^extra_k_cache needs extra_indices_in_kvcache beside it, got None$"):
        flash_mla.flash_mla_with_kvcache(*sparse, is_fp8_kvcache=True, indices=indices, extra_k_cache=cache)
    with pytest.raises(ValueError, match=r"^sm_scale must be a finite number above 0, got -1.0$"):
        flash_mla.flash_mla_sparse_fwd(q[0], torch.zeros(4, 1, 576, dtype=q.dtype), indices[0, :, None], -1.0)


def test_no_gradient_is_recorded():
    inputs = DenseDecodeCase(1, 1, 8, 2).inputs()
    out, lse = dense_decode(**inputs | {"q": inputs["q"].requires_grad_()})
    assert not out.requires_grad
    assert not lse.requires_grad
