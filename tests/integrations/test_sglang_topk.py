"""Top-k of SGLang's indexer, and the resolution of its logits functions."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.sglang_calls import draw, untouched

from flashlatte import deep_gemm
from flashlatte.integrations.sglang import indexer


def chosen_columns(scores, starts, lengths, k):
    """Top-k columns of each row relative to its start, in ascending order, padded with -1."""
    rows = []
    for row, start, length in zip(scores, starts, lengths, strict=True):
        taken = sorted(row[start : start + length].topk(min(k, length)).indices.tolist())
        rows.append(taken + [-1] * (k - len(taken)))
    return rows


def test_top_k_of_rows_that_begin_anywhere():
    scores, starts, lengths = draw(3, 50), [0, 7, 20], [50, 3, 30]
    row_starts, row_lengths = torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    ours = SimpleNamespace(is_sgl_kernel=lambda: True)
    indices = indexer.topk_func(untouched, ours, scores, row_lengths, 8, row_starts=row_starts)
    expected = chosen_columns(scores, starts, lengths, 8)
    assert indices.tolist() == expected
    assert indexer.topk_func(untouched, ours, scores, row_lengths, 8).tolist() == chosen_columns(
        scores, [0, 0, 0], lengths, 8
    )
    other = SimpleNamespace(is_sgl_kernel=lambda: False)
    original: Any = lambda *args, **kwargs: "theirs"  # noqa: E731
    assert indexer.topk_func(original, other, scores, row_lengths, 8) == "theirs"

    out, offsets = torch.empty(3, 8, dtype=torch.int32), torch.tensor([0, 7, 100], dtype=torch.int32)
    call = {"out_offsets": offsets, "out_indices": out, "row_starts": row_starts}
    indexer.topk_transform_ragged_v2(untouched, scores, row_lengths, **call)
    shifted = [[i + offset if i >= 0 else -1 for i in row] for row, offset in zip(expected, (0, 7, 100), strict=True)]
    assert out.tolist() == shifted


def test_top_k_as_slots_of_pages():
    scores, lengths = draw(2, 12), [12, 3]
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    table = torch.tensor([[9, 2, 5], [4, 0, 0]], dtype=torch.int32)
    columns = chosen_columns(scores, [0, 0], lengths, 4)
    slots = [
        [int(table[row, i // 4]) * 4 + i % 4 if i >= 0 else -1 for i in taken] for row, taken in enumerate(columns)
    ]
    out, raw = torch.empty(2, 4, dtype=torch.int32), torch.empty(2, 4, dtype=torch.int32)
    indexer.topk_transform_paged_v2(untouched, scores, seq_lens, table, out, 4, None)
    assert out.tolist() == slots
    indexer.topk_transform_paged_v2(untouched, scores, seq_lens, table, out, 4, None, raw)
    assert (out.tolist(), raw.tolist()) == (slots, columns)
    indexer.topk_transform_paged_v2(untouched, scores, seq_lens, None, out, 4, None, raw.fill_(7))
    assert out.tolist() == raw.tolist() == columns
    # SGLang's kernels find pages by the stride of a row.
    indexer.topk_transform_paged_v2(untouched, scores, seq_lens, table[:, :1], out, 4, None)
    assert out.tolist() == slots


def test_top_k_of_a_prefill_as_slots():
    """Three requests with 2, 0 and 3 rows over concatenated keys of 10, 4 and 20 tokens."""
    scores, starts, lengths = draw(5, 34), [0, 0, 14, 14, 14], [9, 10, 18, 19, 3]
    scores[:2, 10:], scores[2:, :14] = torch.nan, torch.nan  # of other requests
    row_starts, row_lengths = torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    table = 1000 + torch.randperm(3 * 20, generator=torch.Generator().manual_seed(1)).view(3, 20).int()
    first_rows = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    requests = [0, 0, 2, 2, 2]
    columns = chosen_columns(scores, starts, lengths, 8)
    expected = [[int(table[b, i]) if i >= 0 else -1 for i in row] for b, row in zip(requests, columns, strict=True)]
    prefill = partial(indexer.fast_topk_transform_fused, untouched, scores, row_lengths, topk=8, row_starts=row_starts)
    slots = prefill(page_table_size_1=table, cu_seqlens_q=first_rows)
    assert (slots.dtype, slots.tolist()) == (torch.int32, expected)
    assert prefill(page_table_size_1=table[:, :2], cu_seqlens_q=first_rows).tolist() == expected
    # A long prefill is split into chunks, with a page table for each row.
    assert prefill(page_table_size_1=table[requests], cu_seqlens_q=torch.arange(6)).tolist() == expected


@pytest.mark.parametrize("rows_of_requests", [[0, 1, 2, 3], [0, 3]])
def test_top_k_of_a_decode_as_slots(rows_of_requests):
    """A row for each request, or, for drafts, several."""
    scores, lengths = draw(3, 30), [30, 3, 20]
    table = 100 + torch.randperm(90, generator=torch.Generator().manual_seed(1)).view(3, 30).int()
    table, first_rows = table[: len(rows_of_requests) - 1], torch.tensor(rows_of_requests, dtype=torch.int32)
    columns = chosen_columns(scores, [0] * 3, lengths, 8)
    requests = range(3) if len(table) == 3 else [0] * 3
    expected = [[int(table[b, i]) if i >= 0 else -1 for i in row] for b, row in zip(requests, columns, strict=True)]
    row_lengths = torch.tensor(lengths, dtype=torch.int32)
    slots = indexer.fast_topk_transform_fused(untouched, scores, row_lengths, table[:, :1], first_rows, 8)
    assert (slots.dtype, slots.tolist()) == (torch.int32, expected)


def test_slots_take_one_launch(monkeypatch):
    """The kernel of top-k reads the page table."""

    def converted(*_: Any, **__: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(indexer, "index_convert", converted)
    scores, lengths = draw(2, 12), torch.tensor([12, 3], dtype=torch.int32)
    out = torch.empty(2, 4, dtype=torch.int32)
    indexer.topk_transform_paged_v2(untouched, scores, lengths, torch.zeros(2, 3).int(), out, 4, None)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    assert indexer.fast_topk_transform_fused(untouched, scores, lengths, out, starts, 4).shape == (2, 4)


@pytest.mark.parametrize("with_starts", [False, True])
def test_topk_of_rows_as_indices_into_the_batch(with_starts):
    scores, starts, lengths = (
        torch.randn(4, 60, generator=torch.Generator().manual_seed(2)),
        [0, 7, 20, 3],
        [60, 30, 4, 0],
    )
    starts = starts if with_starts else [0] * 4
    offsets = [100, 0, 2000, 7]
    columns = chosen_columns(scores, starts, lengths, 8)
    expected = [[offset + i if i >= 0 else -1 for i in row] for offset, row in zip(offsets, columns, strict=True)]
    places = indexer.fast_topk_transform_ragged_fused(
        untouched,
        score=scores,
        lengths=torch.tensor(lengths, dtype=torch.int32),
        topk_indices_offset=torch.tensor(offsets, dtype=torch.int32),
        topk=8,
        row_starts=torch.tensor(starts, dtype=torch.int32) if with_starts else None,
    )
    assert (places.dtype, places.tolist()) == (torch.int32, expected)


def test_sglang_runs_a_k_above_4096():
    called: list[Any] = []
    original: Any = lambda *args: called.append(args)  # noqa: E731
    out = torch.empty(1, 5000, dtype=torch.int32)
    scores, lengths = torch.zeros(1, 6000), torch.tensor([6000])
    indexer.topk_transform_paged_v2(original, scores, lengths, None, out, 1, None)
    assert called[0][3] is out
    starts = torch.tensor([0, 1])
    indexer.fast_topk_transform_fused(original, scores, lengths, out, starts, 5000)
    assert called[1][3:] == (starts, 5000, None)
    indexer.fast_topk_transform_ragged_fused(original, scores, lengths, starts[:1], 5000)
    assert called[2][3:] == (5000, None)


@pytest.mark.parametrize("error", [ModuleNotFoundError, OSError, RuntimeError])
def test_resolution_of_the_indexers_functions(error):
    """SGLang's function (DeepGEMM's, which is hooked, or one selected by a flag); FlashLatte's if DeepGEMM is
    missing."""

    def no_deep_gemm() -> Any:
        raise error("deep_gemm")

    for resolve, ours in (
        (indexer.resolve_fp8_mqa_logits_fn, deep_gemm.fp8_mqa_logits),
        (indexer.resolve_fp8_paged_mqa_logits_fn, deep_gemm.fp8_paged_mqa_logits),
        (indexer.resolve_paged_mqa_logits_metadata_fn, deep_gemm.get_paged_mqa_logits_metadata),
    ):
        assert resolve(lambda: untouched) is untouched
        assert resolve(no_deep_gemm) is ours


def test_a_schedule_that_another_kernel_may_read_is_deep_gemms(monkeypatch):
    lengths, schedule = torch.tensor([[9]], dtype=torch.int32), torch.ones(5, 2, dtype=torch.int32)
    original: Any = lambda *args: schedule  # noqa: E731
    assert indexer.get_paged_mqa_logits_metadata(untouched, lengths, 64, 4).eq(0).all()
    monkeypatch.setattr(indexer.machine, "compute_capability", lambda device: (10, 0))
    assert indexer.get_paged_mqa_logits_metadata(original, lengths, 64, 4) is schedule

    def no_deep_gemm() -> Any:
        raise ModuleNotFoundError("deep_gemm")

    with pytest.raises(ModuleNotFoundError):
        indexer.resolve_paged_mqa_logits_metadata_fn(no_deep_gemm)
