"""``trtllm_batch_decode_with_kv_cache_mla`` and ``xqa_batch_decode_with_kv_cache_mla`` against float64."""

# Dicts of arguments are unpacked, and results are a tensor or a pair.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false

import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.flashinfer_calls import LATENT, ROPE, WORKSPACE, MLARequests

from flashlatte import flashinfer, kv_cache
from flashlatte.runtime import value_checks
from flashlatte.testing import compare, oracles
from flashlatte.testing.compare import assert_close

LOG2_E = math.log2(math.e)


def table_of(case):
    table = torch.zeros(len(case.lengths), max(1, *map(len, case.tables)), dtype=torch.int32)
    for row, pages in zip(table, case.tables, strict=True):
        row[: len(pages)] = pages
    return table


def arguments(case, **changes):
    """A call of requests with equally many queries."""
    queries = case.counts[0]
    return {
        "query": case.q.unflatten(0, (-1, queries)),
        "kv_cache": case.cache,
        "workspace_buffer": WORKSPACE,
        "qk_nope_head_dim": 128,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE,
        "block_tables": table_of(case),
        "seq_lens": case.lists[3],
        "max_seq_len": max(case.lengths),
        "bmm1_scale": case.sm_scale,
    } | changes


def decode(case, **changes):
    return flashinfer.trtllm_batch_decode_with_kv_cache_mla(**arguments(case, **changes))


@given(
    queries=st.integers(1, 3),
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 2, 8]),
    heads_first=st.booleans(),
    seed=st.integers(0, 99),
)
def test_dense(queries, lengths, page_size, heads_first, seed):
    case = MLARequests([queries] * len(lengths), lengths, page_size, True, seed=seed)
    cache = case.cache.unsqueeze(1) if heads_first else case.cache
    out, lse = decode(case, kv_cache=cache, return_lse=True)
    expected, expected_lse = case.expected()
    assert_close(out.flatten(0, 1), expected, compare.FLOAT32, "out")
    assert_close(lse, expected_lse, compare.FLOAT32, "lse")


@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 8]),
    padding=st.integers(0, 2),
)
def test_dense_with_different_numbers_of_queries(counts, page_size, padding):
    case = MLARequests(counts, [7, 20, 0, 3][: len(counts)], page_size, True)
    expected, tokens = case.expected(), len(case.q)
    query = torch.cat((case.q, torch.full((padding, 3, LATENT + ROPE), torch.nan)))
    case.counts = [1]
    boundaries = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    out, lse = decode(case, query=query, cum_seq_lens_q=boundaries, max_q_len=4, return_lse=True)
    assert_close(out[:tokens], expected[0], compare.FLOAT32, "out")
    assert_close(lse[:tokens], expected[1], compare.FLOAT32, "lse")
    assert out[tokens:].eq(0).all()


def test_no_requests():
    empty = {"query": torch.zeros(0, 2, 3, LATENT + ROPE), "seq_lens": torch.zeros(0, dtype=torch.int32)}
    empty["block_tables"] = torch.zeros(0, 4, dtype=torch.int32)
    out, lse = decode(MLARequests([1], [9], 8, True), return_lse=True, **empty)
    assert out.shape == (0, 2, 3, LATENT)
    assert lse.shape == (0, 3)


@pytest.mark.parametrize("shape", [(6, 3), (3, 2, 3)])
def test_outputs_are_written_to(shape):
    case = MLARequests([2] * 3, [8, 20, 3], 8, True)
    out, lse = torch.empty(3, 2, 3, LATENT), torch.empty(shape)
    results = decode(case, out=out, lse=lse, return_lse=True)
    assert results[0] is out
    assert results[1] is lse
    assert_close(out.flatten(0, 1), case.expected()[0], compare.FLOAT32, "out")
    assert_close(lse.view(6, 3), case.expected()[1], compare.FLOAT32, "lse")


def test_strided_outputs():
    """A copy would not be seen by the caller."""
    case = MLARequests([2] * 3, [8, 20, 3], 8, True)
    wide, lse = torch.zeros(3, 2, 3, LATENT + 8), torch.zeros(3, 2, 6)[..., ::2]
    decode(case, out=wide[..., :LATENT], lse=lse)
    assert_close(wide[..., :LATENT].flatten(0, 1), case.expected()[0], compare.FLOAT32, "out")
    assert wide[..., LATENT:].eq(0).all()
    with pytest.raises(ValueError, match="out must have equally spaced query tokens, got strides"):
        decode(case, out=torch.zeros(3, 4, 3, LATENT)[:, :2])
    with pytest.raises(ValueError, match="lse must have equally spaced query tokens, got strides"):
        decode(case, lse=torch.zeros(3, 4, 3)[:, :2])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_scale_of_values(kv_dtype):
    case = MLARequests([2] * 2, [8, 20], 8, True, kv_dtype=kv_dtype)
    out = decode(case, bmm2_scale=0.7)
    case.cache = case.cache.float()
    assert_close(out.flatten(0, 1), case.expected()[0] * 0.7, compare.FLOAT32, "out")


def test_fp8_queries():
    case = MLARequests([1] * 2, [8, 20], 8, True, kv_dtype=torch.float8_e4m3fn)
    query = case.q.to(torch.float8_e4m3fn)
    case.q = query.float()
    out = decode(case, query=query.unsqueeze(1))
    case.cache = case.cache.float()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.flatten(0, 1).double(), case.expected()[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("flat_out", [True, False])
def test_xqa(flat_out):
    case = MLARequests([1] * 2, [8, 20], 8, True)
    out = torch.empty(2, 3, LATENT) if flat_out else None
    result = flashinfer.xqa_batch_decode_with_kv_cache_mla(**arguments(case, out=out))
    assert result.shape == ((2, 3, LATENT) if flat_out else (2, 1, 3, LATENT))
    assert_close(result.view(2, 3, LATENT), case.expected()[0], compare.FLOAT32, "out")
    with pytest.raises(ValueError, match=r"query must have shape \[b, 1, heads, d\]"):
        flashinfer.xqa_batch_decode_with_kv_cache_mla(**arguments(MLARequests([2], [9], 8, True)))


def selection(case, topk, seed=0):
    """Slots [T, topk] of the first tokens of each request in random order; -1 behind."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for count, table, length in zip(case.counts, case.tables, case.lengths, strict=True):
        for _ in range(count):
            tokens = torch.randperm(length, generator=generator)[:topk]
            slots = table[tokens // case.page_size] * case.page_size + tokens % case.page_size
            rows.append(torch.nn.functional.pad(slots, (0, topk - len(slots)), value=-1))
    return torch.stack(rows).int()


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("packed_queries", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
def test_sparse(queries, packed_queries, with_sinks):
    """A query reads as many indices as it has keys: with 2 keys and 3 queries, the first reads none."""
    case = MLARequests([queries] * 3, [20, 2, 0], 8, True)
    slots, sinks = selection(case, 6), torch.randn(3)
    lengths = [length - queries + 1 + token for length in case.lengths for token in range(queries)]
    wanted, natural = oracles.sparse_decode(
        case.q.unsqueeze(1),
        case.cache.unsqueeze(2),
        slots.unsqueeze(1),
        cache_format="fp32",
        topk_length=torch.tensor(lengths).clamp(0, 6),
        attn_sink=sinks if with_sinks else None,
        softmax_scale=0.2,
        head_dim_v=LATENT,
    )
    changes = {"block_tables": slots.view(3, queries, 6)}
    if packed_queries:
        boundaries = torch.arange(0, 3 * queries + 1, queries, dtype=torch.int32)
        changes = {"query": case.q, "cum_seq_lens_q": boundaries, "block_tables": slots}
    out, lse = decode(
        case, sparse_mla_top_k=6, sinks=[sinks] if with_sinks else None, return_lse=True, bmm2_scale=2.0, **changes
    )
    natural = natural.squeeze(2)
    natural = torch.logaddexp(natural, sinks.double()) if with_sinks else natural
    assert_close(out.reshape(-1, 3, LATENT), wanted.squeeze(1) * 2, compare.FLOAT32, "out")
    assert_close(lse, natural * LOG2_E, compare.FLOAT32, "lse")


def test_value_checks_take_lengths_of_requests(monkeypatch):
    """Requests have more keys than they select, or fewer than queries."""
    case = MLARequests([3] * 3, [20, 2, 0], 8, True)
    changes = {"sparse_mla_top_k": 6, "block_tables": selection(case, 6).view(3, 3, 6)}
    wanted = decode(case), decode(case, **changes)
    monkeypatch.setattr(value_checks, "ENABLED", True)
    assert decode(case).equal(wanted[0])
    assert decode(case, **changes).equal(wanted[1])


@pytest.mark.filterwarnings("ignore:sparse_decode has no backward")
def test_sinks_may_be_parameters():
    case = MLARequests([1] * 3, [20, 2, 0], 8, True)
    changes = {"sparse_mla_top_k": 6, "block_tables": selection(case, 6).view(3, 1, 6), "return_lse": True}
    sinks = torch.randn(3)
    for result, wanted in zip(
        decode(case, sinks=torch.nn.Parameter(sinks), **changes), decode(case, sinks=sinks, **changes), strict=True
    ):
        assert result.equal(wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("packed_queries", [False, True])
def test_lengths_of_indices(packed_queries, dtype):
    """Each query reads so many of its indices, whatever its request's keys are."""
    case = MLARequests([2] * 3, [20, 9, 5], 8, True)
    slots, counts = selection(case, 6), torch.tensor([6, 1, 0, 4, 9, 3], dtype=dtype)
    wanted, natural = oracles.sparse_decode(
        case.q.unsqueeze(1),
        case.cache.unsqueeze(2),
        slots.unsqueeze(1),
        cache_format="fp32",
        topk_length=counts.clamp(max=6),
        softmax_scale=0.2,
        head_dim_v=LATENT,
    )
    changes = {"block_tables": slots.view(3, 2, 6), "seq_lens": None}
    if packed_queries:
        changes |= {"query": case.q, "cum_seq_lens_q": case.lists[0], "block_tables": slots}
    changes |= {"sparse_mla_top_k": 6, "sparse_mla_top_k_lens": counts, "return_lse": True}
    out, lse = decode(case, return_lse_base="basee", **changes)
    assert_close(out.reshape(-1, 3, LATENT), wanted.squeeze(1), compare.FLOAT32, "out")
    assert_close(lse, natural.squeeze(2), compare.FLOAT32, "lse")


@pytest.mark.parametrize(("base", "factor"), [(None, 1.0), ("base2", 1.0), ("basee", math.log(2))])
def test_base_of_lse(base, factor):
    case = MLARequests([2] * 2, [8, 20], 8, True)
    # An explicit base is that of every backend.
    backend = "auto" if base is None else "cute-dsl"
    _, lse = decode(case, return_lse=True, return_lse_base=base, backend=backend)
    assert_close(lse, case.expected()[1] * factor, compare.FLOAT32, "lse")


@pytest.mark.parametrize("given_lengths", [None, "requests", "flat", "nested"])
@pytest.mark.parametrize("queries", [1, 2])
def test_sparse_over_a_cache_of_656_bytes(queries, given_lengths):
    generator = torch.Generator().manual_seed(0)
    cache = kv_cache.pack(torch.randn(3, 16, 1, 576, generator=generator), "v32")
    query = torch.randn(2, queries, 16, 576, generator=generator).bfloat16()
    indices = torch.randint(-1, 48, (2, queries, 9), generator=generator, dtype=torch.int32)
    shapes = {None: None, "requests": (2,), "flat": (2 * queries,), "nested": (2, queries)}
    shape = shapes[given_lengths]
    lengths = None if shape is None else torch.arange(3, 3 + math.prod(shape), dtype=torch.int32).view(shape)
    out, lse = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        query, cache.view(torch.uint8).view(3, 1, 16, 656), WORKSPACE, 128, 512, 64, indices, lengths, 48, 9,
        bmm1_scale=0.1, return_lse=True,
    )  # fmt: skip
    # All indices, as in FlashInfer.
    ignored = given_lengths is None or (given_lengths == "requests" and queries > 1)
    wanted, natural = oracles.sparse_decode(
        query,
        cache,
        indices,
        cache_format="v32",
        topk_length=None if ignored else lengths.view(2, queries),
        softmax_scale=0.1,
    )
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(
        lse.view(2, queries, 16).double(), natural.transpose(1, 2) * LOG2_E, rtol=1e-3, atol=1e-3
    )


def test_lengths_of_indices_belong_to_requests_with_equal_numbers_of_queries():
    case = MLARequests([1] * 2, [8, 20], 8, True)
    changes = {"query": case.q, "cum_seq_lens_q": case.lists[0], "sparse_mla_top_k": 4}
    changes |= {"kv_cache": torch.zeros(2, 8, 656, dtype=torch.uint8), "block_tables": torch.zeros(2, 4).int()}
    with pytest.raises(ValueError, match="cum_seq_lens_q must be None for a cache of 656 bytes a token"):
        decode(case, **changes)


INDICES = torch.zeros(2, 1, 5, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uses_shared_paged_kv_idx": False}, "uses_shared_paged_kv_idx must be True, as values are columns of keys"),
        ({"backend": "cute-dsl", "return_lse": True}, "backend must not be 'cute-dsl' for an lse"),
        ({"backend": "cudnn"}, "backend must be one of auto, xqa, trtllm-gen, cute-dsl, sparse, hopper"),
        ({"kv_lora_rank": 16}, r"query must have kv_lora_rank \+ qk_rope_head_dim = 32 columns, got 48"),
        ({"sinks": [torch.zeros(3)]}, "sinks must be left out, got .*: dense_decode has no sinks"),
        ({"sinks": 0.5}, "^sinks must be a tensor or a list of one, got float$"),
        ({"sinks": [0.5]}, "^sinks must be a tensor, got float$"),
        ({"bmm1_scale": 0.0}, "bmm1_scale must be a finite number above 0"),
        ({"kv_cache": torch.zeros(2, 2, 8, 48)}, r"kv_cache must have shape \[pages, page_size, d\] or \[pages, 1"),
        ({"block_tables": torch.zeros(2, 2, 9, dtype=torch.int32)}, r"block_tables must have shape \[2, max_pages\]"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, r"seq_lens must have shape \[2\]"),
        (
            {"query": torch.zeros(2, 3, 48), "cum_seq_lens_q": torch.zeros(1, dtype=torch.int32)},
            r"cum_seq_lens_q must have shape \[b \+ 1\] with b at least 1",
        ),
        ({"return_lse_base": "base10"}, "return_lse_base must be one of base2, basee, got 'base10'"),
        ({"enable_dcp": True}, "enable_dcp must be left out, got True"),
        ({"cp_world": 2}, "cp_world must be left out, got 2"),
        ({"cp_rank": 1}, "cp_rank must be left out, got 1"),
        ({"causal_seqlens_kv_global": torch.zeros(2)}, "causal_seqlens_kv_global must be left out"),
        ({"use_fp16_softmax": True}, "use_fp16_softmax must be left out, got True"),
        ({"sparse_mla_top_k_lens": torch.ones(2).int()}, "sparse_mla_top_k_lens must be left out"),
        (
            {"sparse_mla_top_k": 5, "sparse_mla_top_k_lens": torch.ones(3).int(), "block_tables": INDICES},
            r"sparse_mla_top_k_lens must have shape \[2\]",
        ),
        ({"sparse_mla_top_k": 5}, r"block_tables must have shape \[2, 1, 5\]"),
        ({"lse": torch.zeros(3, 2)}, r"lse must have shape \[2, 3\]"),
        ({"out": torch.zeros(2, 3, LATENT)}, r"out must have shape \[2, 1, 3, 32\]"),
        ({"bmm1_scale": 1e38}, r"bmm1_scale must be at most 2\^125"),
        ({"kv_lora_rank": "32"}, "kv_lora_rank must be an int, got str"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim must be an int, got NoneType"),
        ({"lse": [0.0]}, "lse must be a tensor, got list"),
        ({"kv_cache": torch.zeros(2, 8, 48).double()}, "kv_cache must be .* got torch.float64"),
        (
            {
                "kv_cache": torch.zeros(2, 8, 48, dtype=torch.uint8),
                "sparse_mla_top_k": 5,
                "block_tables": torch.zeros(2, 1, 5, dtype=torch.int32),
            },
            "kv_cache must be .* got uint8 48 wide",
        ),
    ],
)
def test_refusals(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        decode(MLARequests([1] * 2, [8, 20], 8, True), **change)


def test_scales_on_a_device_are_refused():
    with pytest.raises(
        TypeError, match="bmm2_scale must be a number, which is passed to kernels by value, got a tensor"
    ):
        decode(MLARequests([1] * 2, [8, 20], 8, True), bmm2_scale=torch.ones(1))
