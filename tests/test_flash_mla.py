# Keyword arguments are dicts of mixed values, positional ones sequences of any length.
# pyright: reportArgumentType=false, reportCallIssue=false

import importlib
import inspect
import math
import sys
from dataclasses import replace

import pytest
import torch
from support.flash_mla_calls import assert_same, decode

from flashlatte import dense_decode, flash_mla, kv_cache, sparse_decode, sparse_prefill
from flashlatte.testing import oracles
from flashlatte.testing.cases import DenseDecodeCase, SparseDecodeCase, SparsePrefillCase
from flashlatte.testing.compare import DECODE_LSE, DENSE_DECODE_OUT, assert_close

DENSE = DenseDecodeCase(3, 2, 100, 4, varlen=True, causal=True, seed=1)
SPARSE = SparseDecodeCase(
    2, 2, 90, 4, 64, extra_topk=20, extra_s_k=30, topk_lengths="request", extra_topk_lengths="request"
)
PREFILL = SparsePrefillCase(5, 90, 4, 64, topk_lengths=True, empty_rows=0.3)
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def fp4_beside_fp8():
    """DeepSeek-V4.1's two caches, and the same values in bf16."""
    inputs = replace(SPARSE, cache_format="v41", attn_sink=True).inputs()
    rows = torch.randn(*inputs["extra_k_cache"].shape[:2], 1, 512, generator=torch.Generator().manual_seed(0))
    inputs["extra_k_cache"] = kv_cache.pack(rows, "v41_fp4")
    plain = inputs | {"cache_format": None}
    for name, form in (("k_cache", "v41"), ("extra_k_cache", "v41_fp4")):
        plain[name] = kv_cache.unpack(inputs[name], form)
    return inputs, plain


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("says_fp8", [False, True, None])
@pytest.mark.parametrize("says_format", [{"kv_format": "V41"}, {"use_legacy": False}])
def test_the_caches_of_v41(dtype, says_fp8, says_format):
    inputs, plain = fp4_beside_fp8()
    caches = {name: inputs[name].view(dtype) for name in ("k_cache", "extra_k_cache")}
    results = decode(inputs | caches, is_fp8_kvcache=says_fp8, backend="reference", **says_format)
    expected = sparse_decode(**plain, backend="reference", empty_lse=math.inf)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted)


@pytest.mark.parametrize(
    ("kv_format", "cache_format"), [("V32", "v32"), ("V32_NO_ROPE", "v32_no_rope"), ("V4", "model1"), ("V41", "v41")]
)
def test_formats_by_flash_mlas_names(kv_format, cache_format):
    inputs = replace(SPARSE, cache_format=cache_format).inputs()
    expected = sparse_decode(**inputs, empty_lse=math.inf)
    assert_same(decode(inputs, kv_format=kv_format, use_legacy=None if kv_format == "V41" else True), expected)


@pytest.mark.parametrize("cache_format", ["v41", "v32_no_rope"])
@pytest.mark.parametrize("use_legacy", [None, True])
def test_an_ambiguous_width_is_an_error(cache_format, use_legacy):
    inputs = replace(SPARSE, cache_format=cache_format).inputs()
    message = "^k_cache is 528 bytes wide, which is ambiguous: kv_format must be given, 'V32_NO_ROPE' or 'V41' "
    with pytest.raises(ValueError, match=message):
        decode(inputs, use_legacy=use_legacy)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kv_format": "V4"}, ValueError, "^k_cache of format model1 must be 584 wide, got 656$"),
        ({"kv_format": "MODEL1"}, ValueError, "^kv_format must be one of V32, V32_NO_ROPE, V4, V41, V41_FP4, got 'MO"),
        ({"kv_format": "V41", "use_legacy": True}, ValueError, "^kv_format must not be 'V41' with use_legacy=True: "),
        ({"use_legacy": 1}, TypeError, "^use_legacy must be True or False, got 1$"),
        ({"enable_batch_invariant": 0}, TypeError, "^enable_batch_invariant must be True or False, got 0$"),
        ({"indices": None, "kv_format": "V32"}, ValueError, "^kv_format belongs to sparse decode"),
    ],
)
def test_errors_of_newer_arguments(change, error, message):
    inputs = replace(
        SPARSE, extra_topk=0, extra_s_k=0, topk_lengths="all", extra_topk_lengths="all", attn_sink=False
    ).inputs()
    inputs |= {"block_table": inputs["indices"], "cache_seqlens": inputs["indices"]}
    with pytest.raises(error, match=message):
        decode(inputs, **change)


def test_the_last_arguments_by_position():
    """In the order of sgl-flash-mla, and in that of vLLM's copy."""
    inputs = replace(SPARSE, cache_format="v32_no_rope").inputs()
    schedule, num_splits = flash_mla.get_mla_metadata()
    names = ("indices", "attn_sink", "extra_k_cache", "extra_indices", "topk_length", "extra_topk_length")
    start = (
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
    )
    start += tuple(inputs.get(name) for name in names)
    expected = sparse_decode(**inputs, empty_lse=math.inf, batch_invariant=True)
    assert_same(flash_mla.flash_mla_with_kvcache(*start, True, True, "V32_NO_ROPE", None, None), expected)
    assert_same(flash_mla.flash_mla_with_kvcache(*start, True, use_legacy=True, kv_format="V32_NO_ROPE"), expected)
    out = torch.empty_like(expected[0])
    results = flash_mla.flash_mla_with_kvcache(*start, out, True, kv_format="V32_NO_ROPE")
    assert_same(results, expected)
    assert results[0] is out
    results = flash_mla.flash_mla_with_kvcache(*start, None, True, kv_format="V32_NO_ROPE")
    assert_same(results, expected)
    with pytest.raises(
        TypeError, match=r"^flash_mla_with_kvcache has at most 2 positional arguments from out on, got 3$"
    ):
        flash_mla.flash_mla_with_kvcache(*start, out, True, "V32_NO_ROPE")


def test_the_last_arguments_of_sparse_prefill_by_position():
    inputs = PREFILL.inputs()
    expected = sparse_prefill(**inputs, empty_lse=math.inf)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(*inputs.values(), True, True)
    assert out.equal(expected[0])
    assert max_logits.equal(expected[1] * math.log2(math.e))
    assert lse.equal(expected[2] * math.log2(math.e))
    assert flash_mla.flash_mla_sparse_fwd(*inputs.values(), True, False)[1:] == (None, None)
    assert_same(flash_mla.flash_mla_sparse_fwd(*inputs.values(), False), expected)
    given = torch.empty_like(out)
    assert flash_mla.flash_mla_sparse_fwd(*inputs.values(), given)[0] is given


def test_a_schedule_of_tensors():
    inputs = DENSE.inputs()
    metadata, num_splits = flash_mla.get_mla_decoding_metadata(inputs["cache_seqlens"], 8, 1, use_legacy=True)
    assert (metadata.shape, num_splits.shape) == ((1, 8), (4,))
    results = decode(inputs, tile_scheduler_metadata=metadata, num_splits=num_splits)
    assert_same(results, dense_decode(**inputs, empty_lse=math.inf))
    schedule = flash_mla.FlashMLASchedMeta(tile_scheduler_metadata=metadata, num_splits=num_splits)
    assert_same(decode(inputs, tile_scheduler_metadata=schedule), results)
    assert flash_mla.has_legacy()


def test_only_v41_accepts_a_second_format():
    inputs, _ = fp4_beside_fp8()
    v32 = SPARSE.inputs() | {"extra_k_cache": inputs["extra_k_cache"]}
    with pytest.raises(ValueError, match=r"^extra_k_cache of format v32 must be 656 wide, got 288$"):
        decode(v32)


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


def test_descale_of_none_is_accepted_for_any_cache():
    inputs = DENSE.inputs()
    assert_same(decode(inputs, descale_q=None, descale_k=None), decode(inputs))


def test_sparse_decode_over_a_bf16_cache_ignores_the_table():
    inputs = SparseDecodeCase(2, 1, 90, 4, 64, cache_format="bf16").inputs()
    expected = sparse_decode(**inputs, empty_lse=math.inf)
    assert_same(decode(inputs, block_table="anything", cache_seqlens=5), expected)


def test_given_outputs_are_returned():
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
        (DENSE, {"num_splits": torch.zeros(1)}, ValueError, "^num_splits must be None with a .* got Tensor$"),
        (DENSE, {"attn_sink": SINK}, ValueError, "^attn_sink belongs to sparse decode and needs indices"),
        (DENSE, {"extra_k_cache": CACHE}, ValueError, "^extra_k_cache belongs to sparse decode and needs indices"),
        (DENSE, {"extra_indices_in_kvcache": SINK}, ValueError, "^extra_indices_in_kvcache belongs to sparse decode"),
        (DENSE, {"topk_length": SINK}, ValueError, "^topk_length belongs to sparse decode and needs indices"),
        (DENSE, {"extra_topk_length": SINK}, ValueError, "^extra_topk_length belongs to sparse decode"),
        (DENSE, {"block_table": None}, ValueError, "^block_table must be given for dense decode .* got None$"),
        (DENSE, {"cache_seqlens": None}, ValueError, "^cache_seqlens must be given for dense decode .* got None$"),
        (DENSE, {"is_fp8_kvcache": True}, ValueError, "^is_fp8_kvcache must .* got True with k_cache bfloat16$"),
        (DENSE, {"is_fp8_kvcache": 1}, TypeError, "^is_fp8_kvcache must be True or False, got 1$"),
        (DENSE, {"descale_k": 1.0}, ValueError, "must be None unless k_cache is float8_e4m3fn"),
        (DENSE, {"descale_q": 1.0}, ValueError, "^descale_q belongs to a float8_e4m3fn q, got bfloat16$"),
        (DENSE, {"q": None, "descale_q": 1.0}, ValueError, "^descale_q belongs to .*, got NoneType$"),
        (DENSE, {"q": FP8_QUERY, "descale_q": -1.0}, ValueError, "^descale_q must be a finite number above 0, got -1"),
        (DENSE, {"q": FP8_QUERY, "descale_q": SINK}, ValueError, r"^descale_q must have one element, got shape \[4\]$"),
        (SPARSE, {"causal": True}, ValueError, "^causal must be False in sparse decode .* got True$"),
        (SPARSE, {"causal": 0}, TypeError, "^causal must be True or False, got 0$"),
        (SPARSE, {"is_fp8_kvcache": False}, ValueError, "^is_fp8_kvcache must .* got False with k_cache uint8$"),
        (SPARSE, {"descale_k": 1.0}, ValueError, "^descale_k belongs to dense decode over an fp8 cache"),
        (SPARSE, {"descale_q": 1.0}, ValueError, "^descale_q belongs to dense decode over an fp8 cache"),
        (SPARSE, {"extra_indices_in_kvcache": None}, ValueError, "must be given if extra_k_cache.* is, got None$"),
        (SPARSE, {"extra_k_cache": None}, ValueError, "must be None if extra_k_cache is None"),
        (SPARSE, {"num_splits": SINK}, ValueError, "^num_splits must be None"),
    ],
)
def test_contradictions_are_errors(case, change, error, message):
    with pytest.raises(error, match=message):
        decode(case.inputs(), **change)


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


def test_the_alias_replaces_no_installed_package(tmp_path, capsys):
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
    with pytest.raises(ValueError, match=r"^extra_indices_in_kvcache must be given if extra_k_cache is, got None$"):
        flash_mla.flash_mla_with_kvcache(*sparse, is_fp8_kvcache=True, indices=indices, extra_k_cache=cache)
    with pytest.raises(ValueError, match=r"^sm_scale must be a finite number above 0, got -1.0$"):
        flash_mla.flash_mla_sparse_fwd(q[0], torch.zeros(4, 1, 576, dtype=q.dtype), indices[0, :, None], -1.0)


@pytest.mark.filterwarnings("ignore:dense_decode has no backward:UserWarning")
def test_no_gradient_is_recorded():
    inputs = DenseDecodeCase(1, 1, 8, 2).inputs()
    out, lse = dense_decode(**inputs | {"q": inputs["q"].requires_grad_()})
    assert not out.requires_grad
    assert not lse.requires_grad
