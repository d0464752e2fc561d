"""DeepGEMM's indexer functions as vLLM and SGLang call them, within DeepGEMM's own bounds."""

import importlib
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.deep_gemm_calls import assert_near, draw, drawn_query, generator, logits_of, mxfp8

from flashlatte import deep_gemm, kv_cache
from flashlatte.kv_cache import fp4
from flashlatte.kv_cache.index_formats import quantize_rows
from flashlatte.ops.index_quantize import index_quantize

M, N, H, D = 37, 290, 32, 128
STARTS = torch.arange(M, dtype=torch.int32) * 3
ENDS = (STARTS * 2 + 40).clamp(max=N)
COLUMNS = torch.arange(N)
SEEN = (STARTS.unsqueeze(1) <= COLUMNS) & (ENDS.unsqueeze(1) > COLUMNS)


def relative_difference(actual, expected):
    """DeepGEMM's measure: 1 - 2⟨x, y⟩ / (‖x‖² + ‖y‖²)."""
    actual, expected = actual.double(), expected.double()
    return float(1 - 2 * (actual * expected).sum() / (actual.square().sum() + expected.square().sum()))


def check(actual, exact, quantized, seen):
    actual, exact, quantized = actual[seen], exact[seen], quantized[seen]
    assert relative_difference(actual, exact) < 1e-3
    assert relative_difference(actual, quantized) < 5e-6


@pytest.fixture
def fp8():
    """q, (k, scales), weights, and the logits of exact and of quantized values."""
    q, k, weights = draw(M, H, D, seed=0), draw(N, D, seed=1), draw(M, H, seed=2)
    q8 = q.to(torch.float8_e4m3fn)
    k8, scales = quantize_rows(k, "exact")
    exact = logits_of(q, k, weights)
    quantized = logits_of(q8.float(), k8.float() * scales.unsqueeze(1), weights)
    return q8, (k8, scales), weights, exact, quantized


def test_contiguous_fp8(fp8):
    q, kv, weights, exact, quantized = fp8
    clean = deep_gemm.fp8_mqa_logits(q, kv, weights, STARTS, ENDS)
    check(clean, exact, quantized, SEEN)
    assert clean.shape == (M, N)
    assert clean.stride() == (320, 1)  # rows begin at multiples of 128 bytes
    assert clean[~SEEN].eq(-torch.inf).all()
    unclean = deep_gemm.fp8_fp4_mqa_logits((q, None), kv, weights, STARTS, ENDS, clean_logits=False)
    assert unclean[SEEN].equal(clean[SEEN])


def test_weights_in_bf16(fp8):
    q, kv, weights, _, _ = fp8
    expected = deep_gemm.fp8_mqa_logits(q, kv, weights, STARTS, ENDS)
    actual = deep_gemm.fp8_mqa_logits(q, kv, weights.bfloat16(), STARTS, ENDS)  # exact in bf16
    assert torch.equal(actual, expected)


def test_compressed_rows(fp8):
    q, kv, weights, _, _ = fp8
    full = deep_gemm.fp8_mqa_logits(q, kv, weights, STARTS, ENDS)
    widest = int((ENDS - STARTS).max())
    compressed = deep_gemm.fp8_mqa_logits(q, kv, weights, STARTS, ENDS, clean_logits=False, max_seqlen_k=widest)
    assert compressed.shape == (M, widest)
    for row, (start, end) in enumerate(zip(STARTS.tolist(), ENDS.tolist(), strict=True)):
        assert compressed[row, : end - start].equal(full[row, start:end])


def test_contiguous_mxfp4_with_bf16_logits():
    q, k, weights = draw(M, H, D, seed=0), draw(N, D, seed=1), draw(M, H, seed=2)
    q4, q_scales = fp4.quantize_mxfp4(q)
    k4, k_scales = fp4.quantize_mxfp4(k)
    quantized = logits_of(fp4.dequantize_mxfp4(q4, q_scales), fp4.dequantize_mxfp4(k4, k_scales), weights)
    logits = deep_gemm.fp8_fp4_mqa_logits(
        (q4.view(torch.int8), q_scales.view(torch.int32).squeeze(-1)),
        (k4.view(torch.int8), k_scales.view(torch.int32).squeeze(-1)),
        weights,
        STARTS,
        ENDS,
        logits_dtype=torch.bfloat16,
    )
    assert logits.dtype == torch.bfloat16
    check(logits, quantized, quantized.to(torch.bfloat16), SEEN)


@pytest.mark.parametrize("next_n", [1, 2])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("kind", ["index_fp8", "index_mxfp4"])
def test_paged(kind, per_token, next_n):
    batch, page_size, columns = 3, 64, 5
    lengths = torch.tensor([64, 300, 17], dtype=torch.int32)
    q, weights = draw(batch, next_n, H, D, seed=0), draw(batch * next_n, H, seed=1)
    cache = kv_cache.allocate(kind, batch * columns, page_size)
    table = torch.randperm(batch * columns, generator=generator(2)).int().view(batch, columns)
    k = draw(batch * columns * page_size, D, seed=3)
    index_quantize(cache, torch.arange(len(k)), k)
    if kind == "index_fp8":
        q_values = q.to(torch.float8_e4m3fn)
        query, known = (q_values, None), q_values.float()
    else:
        q4, scales = fp4.quantize_mxfp4(q)
        query, known = (q4.view(torch.int8), scales.view(torch.int32).squeeze(-1)), fp4.dequantize_mxfp4(q4, scales)
    limits = lengths.unsqueeze(1) - next_n + 1 + torch.arange(next_n, dtype=torch.int32)
    context_lens = limits if per_token else lengths
    schedule = deep_gemm.get_paged_mqa_logits_metadata(context_lens, page_size, 132)
    assert schedule.shape == (133, 2)
    logits = deep_gemm.fp8_fp4_paged_mqa_logits(
        query, cache, weights, context_lens, table, schedule, max_context_len=400, clean_logits=True
    )
    assert logits.shape == (batch * next_n, 400)
    stored = kv_cache.unpack(cache, kind, dtype=torch.float32)[:, :, 0]
    for request in range(batch):
        keys = stored[table[request].long()].flatten(0, 1)
        rows = slice(request * next_n, (request + 1) * next_n)
        expected = torch.full((next_n, 400), -torch.inf, dtype=torch.float64)
        expected[:, : len(keys)] = logits_of(known[request], keys, weights[rows])
        seen = torch.arange(400) < limits[request].unsqueeze(1)
        check(logits[rows], expected, expected, seen)
        assert logits[rows][~seen].eq(-torch.inf).all()
    if kind == "index_fp8":
        earlier = deep_gemm.fp8_paged_mqa_logits(query[0], cache, weights, context_lens, table, None, 400, True)
        assert earlier.equal(logits)


def test_the_form_of_deep_gemm_2_8_is_detected_by_types(fp8):
    q, kv, weights, _, _ = fp8
    full = deep_gemm.fp8_mqa_logits(q, kv, weights, STARTS, ENDS)
    widest = int((ENDS - STARTS).max())
    schedule = deep_gemm.get_mqa_logits_metadata(STARTS, ENDS, N, H)
    ranges = (weights, STARTS, ENDS)
    calls = [
        deep_gemm.fp8_fp4_mqa_logits((q, None), kv, *ranges, widest),
        deep_gemm.fp8_fp4_mqa_logits((q, None), kv, *ranges, widest, schedule),
        deep_gemm.fp8_fp4_mqa_logits((q, None), kv, *ranges, widest, torch.zeros(133, 2, dtype=torch.int32)),
        deep_gemm.fp8_fp4_mqa_logits(q, kv, *ranges, max_seqlen_k=widest, schedule_meta=schedule),
        deep_gemm.fp8_fp4_mqa_logits(q, kv, *ranges, False, widest),
    ]
    for logits in calls:
        assert (logits.shape, logits.dtype) == ((M, widest), torch.float32)
        for row, (start, end) in enumerate(zip(STARTS.tolist(), ENDS.tolist(), strict=True)):
            assert logits[row, : end - start].equal(full[row, start:end])
    # bf16 weights give bf16 logits, as on SM100; the earlier argument order gives float32.
    in_bf16 = deep_gemm.fp8_fp4_mqa_logits((q, None), kv, weights.bfloat16(), STARTS, ENDS, widest)
    assert in_bf16[0, : ENDS[0]].equal(calls[0][0, : ENDS[0]].bfloat16())
    earlier = deep_gemm.fp8_fp4_mqa_logits((q, None), kv, weights.bfloat16(), STARTS, ENDS, True)
    assert earlier.equal(full)


def test_the_paged_form_of_deep_gemm_2_8_is_detected_by_types():
    q, weights = draw(2, 1, 8, D, seed=0).to(torch.float8_e4m3fn), draw(2, 8, seed=1).bfloat16()
    cache, lengths = kv_cache.allocate("index_fp8", 3, 64), torch.tensor([70, 9], dtype=torch.int32)
    index_quantize(cache, torch.arange(192), draw(192, D, seed=2))
    call = ((q, None), cache, weights, lengths, torch.tensor([[0, 2], [1, 1]], dtype=torch.int32), None, 128)
    indices = torch.arange(2, dtype=torch.int32)
    earlier = deep_gemm.fp8_fp4_paged_mqa_logits(*call, True)
    assert earlier.dtype == torch.float32
    for logits in (
        deep_gemm.fp8_fp4_paged_mqa_logits(*call),
        deep_gemm.fp8_fp4_paged_mqa_logits(*call, indices),
        deep_gemm.fp8_fp4_paged_mqa_logits(*call, indices=indices),
    ):
        assert logits.dtype == torch.bfloat16
        assert logits[0, :70].equal(earlier[0, :70].bfloat16())
    with pytest.raises(TypeError, match=r"^clean_logits must be True or False if indices is given"):
        deep_gemm.fp8_fp4_paged_mqa_logits(*call, indices, indices=indices)


def test_mxfp8_queries_and_keys():
    (q, q_known), (kv, k_known) = mxfp8(draw(M, H, D, seed=0)), mxfp8(draw(N, D, seed=1))
    weights = draw(M, H, seed=2)
    logits = deep_gemm.fp8_fp4_mqa_logits(q, kv, weights, STARTS, ENDS)
    expected = logits_of(q_known, k_known, weights)
    check(logits, expected, expected, SEEN)
    cache = kv_cache.allocate("index_fp8", 2, 64)
    with pytest.raises(ValueError, match=r"caches of mxfp8 keys are not supported$"):
        deep_gemm.fp8_fp4_paged_mqa_logits(
            (q[0].unsqueeze(1), q[1].unsqueeze(1)), cache, weights, ENDS, ENDS.unsqueeze(1), None, 64
        )


@given(
    rows=st.integers(1, 9),
    num_keys=st.sampled_from([1, 7, 60]),
    heads=st.sampled_from([1, 5, 64]),
    mxfp4=st.booleans(),
    clean=st.booleans(),
    compressed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32),
)
def test_drawn_calls_against_float64(rows, num_keys, heads, mxfp4, clean, compressed, dtype, seed):
    q, k, weights = draw(rows, heads, D, seed=seed), draw(num_keys, D, seed=seed + 1), draw(rows, heads, seed=seed + 2)
    start = torch.randint(0, num_keys + 1, (rows,), generator=generator(seed + 3)).int()
    end = torch.randint(0, num_keys + 3, (rows,), generator=generator(seed + 4)).int()
    query, q_known = drawn_query(q, mxfp4)
    if mxfp4:
        values, scales = fp4.quantize_mxfp4(k)
        kv, k_known = (
            (values.view(torch.int8), scales.view(torch.int32).squeeze(-1)),
            fp4.dequantize_mxfp4(values, scales),
        )
    else:
        kv = quantize_rows(k, "exact")
        k_known = kv[0].double() * kv[1].double().unsqueeze(1)
    exact = logits_of(q_known, k_known, weights)
    bound = logits_of(q_known.abs(), k_known.abs(), weights.abs())
    width = int((end.clamp(max=num_keys) - start).max().clamp(min=1)) if compressed else 0
    logits = deep_gemm.fp8_fp4_mqa_logits(
        query, kv, weights, start, end, clean_logits=clean, max_seqlen_k=width, logits_dtype=dtype, backend="reference"
    )
    assert logits.shape == (rows, width or num_keys)
    assert logits.stride(0) * dtype.itemsize % 128 == 0
    for row, (first, last) in enumerate(zip(start.tolist(), end.clamp(max=num_keys).tolist(), strict=True)):
        at = 0 if compressed else first
        seen = logits[row, at : at + max(last - first, 0)]
        assert_near(seen, exact[row, first : max(last, first)], bound[row, first : max(last, first)], dtype)
        if clean:
            assert logits[row].isneginf().sum() == logits.shape[1] - len(seen)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    next_n=st.integers(1, 3),
    heads=st.sampled_from([1, 5, 64]),
    page_size=st.sampled_from([1, 16, 64]),
    mxfp4=st.booleans(),
    per_token=st.booleans(),
    width=st.sampled_from([1, 40, 50]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32),
)
def test_drawn_paged_calls_against_float64(lengths, next_n, heads, page_size, mxfp4, per_token, width, dtype, seed):
    batch, columns = len(lengths), -(-40 // page_size)
    q, weights = draw(batch, next_n, heads, D, seed=seed), draw(batch * next_n, heads, seed=seed + 1)
    kind = "index_mxfp4" if mxfp4 else "index_fp8"
    cache = kv_cache.allocate(kind, batch * columns, page_size)
    table = torch.randperm(batch * columns, generator=generator(seed + 2)).int().view(batch, columns)
    k = draw(batch * columns * page_size, D, seed=seed + 3)
    index_quantize(cache, torch.arange(len(k)), k)
    stored = kv_cache.unpack(cache, kind, dtype=torch.float32)[:, :, 0]
    query, q_known = drawn_query(q, mxfp4)
    limits = torch.tensor(lengths).unsqueeze(1) - next_n + 1 + torch.arange(next_n)
    logits = deep_gemm.fp8_fp4_paged_mqa_logits(
        query,
        cache,
        weights,
        (limits if per_token else torch.tensor(lengths)).int(),
        table,
        None,
        width,
        clean_logits=True,
        logits_dtype=dtype,
        backend="reference",
    )
    assert logits.shape == (batch * next_n, width)
    for request in range(batch):
        keys = stored[table[request].long()].flatten(0, 1)
        mine = slice(request * next_n, (request + 1) * next_n)
        exact = logits_of(q_known[request], keys, weights[mine])
        bound = logits_of(q_known[request].abs(), keys.abs(), weights[mine].abs())
        for token, row in enumerate(range(mine.start, mine.stop)):
            seen = min(max(int(limits[request, token]), 0), width)
            assert_near(logits[row, :seen], exact[token, :seen], bound[token, :seen], dtype)
            assert logits[row, seen:].isneginf().all()


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_a_slice_of_a_block_table_stands_for_whole_rows(columns):
    """DeepGEMM finds pages by the stride of a row. Entries behind the table are not in the cache."""
    pages, page_size = 6, 64
    cache = kv_cache.allocate("index_fp8", pages, page_size)
    index_quantize(cache, torch.arange(pages * page_size), draw(pages * page_size, D, seed=3))
    table = torch.full((2, 5), 10**6, dtype=torch.int32)
    table[:, :3] = torch.tensor([[4, 0, 3], [1, 5, 2]])
    q, weights = draw(2, 1, 8, D, seed=0).to(torch.float8_e4m3fn), draw(2, 8, seed=1)
    lengths = torch.tensor([3 * page_size, 70], dtype=torch.int32)

    def logits(block_table):
        return deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lengths, block_table, None, 200, True)

    def metadata(block_table):
        blocks = torch.tensor([[0, 2, 5], [3, 1, 0]], dtype=torch.int32)
        return deep_gemm.get_paged_sparse_mqa_logits_metadata(
            lengths, block_table, None, page_size, blocks, torch.float8_e4m3fn, 32
        )

    for call in (logits, metadata):
        assert call(table[:, :columns]).equal(call(table[:, :3].contiguous()))


@pytest.mark.parametrize("indices", [None, torch.tensor([0, 1], dtype=torch.int32)], ids=["requests", "tokens"])
def test_a_schedule_for_all_sms_is_made_without_a_gpu_too(indices, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lengths = torch.tensor([[3], [5]], dtype=torch.int32)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, deep_gemm.get_num_sms(), indices=indices)
    assert schedule.shape == (deep_gemm.get_num_sms() + 1, 2)


def test_the_number_of_sms_is_the_one_that_was_set(monkeypatch):
    from flashlatte.deep_gemm import logits

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(logits, "_num_sms", 0)
    all_sms = deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(all_sms - 1)
    assert deep_gemm.get_num_sms() == all_sms - 1
    with pytest.raises(ValueError, match=rf"^num_sms must be at most the GPU's {all_sms}, got {all_sms + 1}$"):
        deep_gemm.set_num_sms(all_sms + 1)
    deep_gemm.set_num_sms(0)
    assert deep_gemm.get_num_sms() == all_sms


def test_errors(fp8):
    q, kv, weights, _, _ = fp8
    with pytest.raises(TypeError, match=r"^context_lens must be a tensor, got list$"):
        deep_gemm.get_paged_mqa_logits_metadata([1], 64, 132)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^q must be a tuple \(values, scales\), got list$"):
        deep_gemm.fp8_fp4_mqa_logits([q], kv, weights, STARTS, ENDS)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^kv must be a tuple \(values, scales\), got Tensor$"):
        deep_gemm.fp8_mqa_logits(q, kv[0], weights, STARTS, ENDS)
    with pytest.raises(TypeError, match=r"^q of mxfp4 and mxfp8 values must have int32 scales, .* got float32$"):
        deep_gemm.fp8_fp4_mqa_logits((q, kv[1]), kv, weights, STARTS, ENDS)
    with pytest.raises(ValueError, match=r"^q must be one-byte values"):
        deep_gemm.fp8_fp4_mqa_logits((q, torch.zeros(M, 3, dtype=torch.int32)), kv, weights, STARTS, ENDS)
    half = torch.zeros(M, H, 32, dtype=torch.uint8), torch.zeros(M, H, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^q must be one-byte values \[..., 64\] .* got uint8 \[37, 32, 32\]"):
        deep_gemm.fp8_fp4_mqa_logits(half, kv, weights, STARTS, ENDS)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kv": (torch.zeros(N, 128), None)}, TypeError, r"^kv\[0\] must be float32 if and only if q is"),
        ({"cu_seq_len_k_start": STARTS.float()}, TypeError, "^cu_seq_len_k_start must be int32 or int64, got float32$"),
        ({"cu_seq_len_k_end": ENDS[1:]}, ValueError, r"^cu_seq_len_k_end must have shape \["),
        ({"clean_logits": "no"}, TypeError, "^clean_logits must be True or False, got 'no'$"),
        ({"clean_logits": 1, "max_seqlen_k": 5}, TypeError, "^clean_logits must be True or False if max_seqlen_k"),
        ({"logits_dtype": torch.float16}, TypeError, "^logits_dtype must be float32 or bfloat16, got torch.float16$"),
    ],
)
def test_errors_use_deep_gemms_names(fp8, change, error, message):
    q, kv, weights, _, _ = fp8
    arguments = {"kv": kv, "weights": weights, "cu_seq_len_k_start": STARTS, "cu_seq_len_k_end": ENDS}
    with pytest.raises(error, match=message):
        deep_gemm.fp8_fp4_mqa_logits((q, None), **(arguments | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kv_cache": [0]}, TypeError, "^kv_cache must be a tensor, got list$"),
        ({"context_lens": torch.zeros(3).int()}, ValueError, r"^context_lens must have shape \[2\]"),
        ({"max_context_len": None}, TypeError, "^max_context_len must be an int, got NoneType$"),
        ({"logits_dtype": 4}, TypeError, "^logits_dtype must be float32 or bfloat16, got 4$"),
    ],
)
def test_errors_of_paged_logits_use_deep_gemms_names(change, error, message):
    arguments = {
        "q": (torch.zeros(2, 1, 8, 128).to(torch.float8_e4m3fn), None),
        "kv_cache": torch.zeros(3, 4, 1, 132, dtype=torch.uint8),
        "weights": torch.zeros(2, 8),
        "context_lens": torch.zeros(2, dtype=torch.int32),
        "block_table": torch.zeros(2, 1, dtype=torch.int32),
        "schedule_meta": None,
        "max_context_len": 5,
    }
    with pytest.raises(error, match=message):
        deep_gemm.fp8_fp4_paged_mqa_logits(**(arguments | change))


def test_the_alias_forwards_the_top_level_name(tmp_path, monkeypatch):
    assert deep_gemm.main(["--install-alias", str(tmp_path)]) == 0
    assert deep_gemm.main(["--install-alias", str(tmp_path)]) == 0
    monkeypatch.syspath_prepend(tmp_path)
    alias = importlib.import_module("deep_gemm")
    sys.modules.pop("deep_gemm")
    assert str(alias.__file__).startswith(str(tmp_path))
    assert all(getattr(alias, name) is getattr(deep_gemm, name) for name in deep_gemm.__all__)


def test_the_alias_replaces_no_installed_package(tmp_path, capsys):
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm" / "__init__.py").write_text("original = True\n")
    assert deep_gemm.main(["--install-alias", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    with pytest.raises(FileExistsError, match=r"was not written by this command"):
        deep_gemm.install_alias(tmp_path)
