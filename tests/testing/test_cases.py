import pytest
import torch

from flashlatte import kv_cache
from flashlatte.testing.cases import DenseDecodeCase, DensePrefillCase, SparseDecodeCase, SparsePrefillCase
from flashlatte.testing.draws import UNREACHED_PAGE

CASES = [
    DenseDecodeCase(batch=3, s_q=2, s_k=20, h_q=4, head_dim=8, head_dim_v=4, page_size=3),
    SparseDecodeCase(batch=2, s_q=2, s_k=20, h_q=4, topk=6, extra_topk=5, extra_s_k=9, topk_lengths="token"),
    SparsePrefillCase(s_q=4, s_kv=20, h_q=4, topk=6, head_dim=8, d_v=4, topk_lengths=True),
    DensePrefillCase(batch=3, s_q=9, s_k=7, h_q=4, h_kv=2, head_dim=8, d_v=4, varlen=True, unowned=2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case).__name__)
def test_a_seed_draws_the_same_again(case):
    first, again = case.inputs(), case.inputs()
    assert first.keys() == again.keys()
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, again[name], rtol=0, atol=0, equal_nan=True)


def test_unused_cache_rows_are_nan_and_unreached_table_entries_far_away():
    case = DenseDecodeCase(8, 1, 20, 4, head_dim=8, head_dim_v=4, page_size=3, varlen=True, zero_lengths=True)
    inputs = case.inputs()
    lengths, table, cache = inputs["cache_seqlens"].tolist(), inputs["block_table"], inputs["k_cache"]
    assert 0 in lengths
    assert len(set(lengths)) > 2
    assert torch.isfinite(cache).all(dim=-1).sum() == sum(lengths)
    for length, pages in zip(lengths, table.tolist(), strict=True):
        used = -(-length // 3)
        assert set(pages[used:]) <= {UNREACHED_PAGE}
        assert cache[pages[:used]].flatten(0, 1)[:length].isfinite().all()


@pytest.mark.parametrize("cache_format", ["v32", "model1", "bf16"])
def test_only_selected_cache_rows_are_finite(cache_format):
    case = SparseDecodeCase(
        3, 2, 30, 4, 16, cache_format=cache_format, page_size=7, topk_lengths="request", strided=True
    )
    inputs = case.inputs()
    cache, indices = inputs["k_cache"], inputs["indices"]
    selected = set()
    for request, length in enumerate(inputs["topk_length"].tolist()):
        selected |= set(indices[request, :, :length].flatten().tolist())
    finite = kv_cache.unpack(cache).isfinite().all(dim=-1).flatten().nonzero().flatten().tolist()
    assert finite == sorted(slot for slot in selected if 0 <= slot < cache.shape[0] * 7)
    assert finite


def test_sparse_cases_match_their_fields():
    inputs = SparsePrefillCase(
        64, 500, 128, 40, head_dim=8, d_v=4, duplicates=True, invalid_share=0.2, empty_rows=0.3
    ).inputs()
    indices, sinks = inputs["indices"][:, 0], inputs["attn_sink"]
    valid = (indices >= 0) & (indices < 500)
    assert 0.1 < (valid.sum(-1) == 0).double().mean() < 0.5
    counts = [row[keep].unique(return_counts=True)[1] for row, keep in zip(indices, valid, strict=True)]
    assert max(int(count.max()) for count in counts if count.numel()) == 2
    assert {-1, -(2**31), 2**31 - 1, 500} <= set(indices[~valid].tolist())
    assert sinks.isposinf().any()
    assert sinks.isneginf().any()
    assert sinks.isfinite().any()


def test_strided_tensors_have_gaps():
    inputs = DenseDecodeCase(2, 2, 20, 4, head_dim=8, head_dim_v=4, page_size=3, strided=True).inputs()
    assert not inputs["q"].is_contiguous()
    assert not inputs["k_cache"].is_contiguous()
    assert inputs["q"].isfinite().all()


def test_prefill_cases_match_their_fields():
    case = DensePrefillCase(20, 9, 7, 4, 2, head_dim=8, d_v=4, varlen=True, zero_lengths=True, unowned=2, strided=True)
    inputs = case.inputs()
    for rows, name in (("q", "q"), ("k", "k"), ("v", "k")):
        boundaries, tokens = inputs[f"cu_seqlens_{name}"], inputs[rows]
        lengths = boundaries.diff()
        assert 0 in lengths.tolist()
        assert lengths.max() == inputs[f"max_seqlen_{name}"]
        assert boundaries[0] == 2
        assert tokens[2 : boundaries[-1]].isfinite().all()
        assert tokens[:2].isnan().all()
        assert tokens[boundaries[-1] :].isnan().all()
        assert not tokens.is_contiguous()
    assert inputs["k"].untyped_storage().data_ptr() == inputs["v"].untyped_storage().data_ptr()
    equal = DensePrefillCase(3, 9, 1, 4, 2, varlen=True, equal=True).inputs()
    assert equal["cu_seqlens_q"].equal(equal["cu_seqlens_k"])
