"""Top-k selection and its conversions against torch.topk."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import flashinfer
from flashlatte.flashinfer import TopKTieBreak, topk

ROWS, WIDTH = 6, 40
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def scores(dtype=torch.float32, seed=0):
    """Distinct values."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(WIDTH, generator=generator) for _ in range(ROWS)]
    return torch.stack(rows).to(dtype)


def selected(row, start, length, k):
    """Positions relative to ``start``, ascending."""
    part = row[start : start + length].float()
    return part.topk(min(k, len(part))).indices.sort().values.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_sorted", [True, False])
def test_top_k(dtype, is_sorted):
    x = scores(dtype)
    values, indices = flashinfer.top_k(x, 7, sorted=is_sorted, deterministic=True)
    wanted = x.float().topk(7)
    assert (values.dtype, indices.dtype) == (dtype, torch.int64)
    assert values.equal(x.gather(1, indices))
    if is_sorted:
        assert indices.equal(wanted.indices)
    else:
        assert indices.equal(wanted.indices.sort(dim=1).values)


LENGTHS = st.lists(st.integers(0, WIDTH), min_size=ROWS, max_size=ROWS)


@given(lengths=LENGTHS, k=st.integers(1, 50), starts=st.one_of(st.none(), LENGTHS), dtype=st.sampled_from(DTYPES))
def test_ragged_transform(lengths, k, starts, dtype):
    x, offsets = scores(dtype), torch.arange(ROWS, dtype=torch.int32) * 100
    begins = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    result = flashinfer.top_k_ragged_transform(
        x, offsets, torch.tensor(lengths, dtype=torch.int32), k, row_starts=begins
    )
    assert result.dtype == torch.int32
    for row in range(ROWS):
        wanted = selected(x[row], 0 if starts is None else starts[row], lengths[row], k)
        assert result[row].tolist() == [100 * row + index for index in wanted] + [-1] * (k - len(wanted))


@given(lengths=LENGTHS, k=st.integers(1, 50), starts=st.one_of(st.none(), LENGTHS), shared=st.booleans())
def test_page_table_transform(lengths, k, starts, shared):
    x, generator = scores(), torch.Generator().manual_seed(1)
    table = torch.randint(0, 10**6, (2 if shared else ROWS, WIDTH), generator=generator, dtype=torch.int32)
    requests = torch.randint(0, 2, (ROWS,), generator=generator, dtype=torch.int32) if shared else None
    begins = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    result = flashinfer.top_k_page_table_transform(
        x, table, torch.tensor(lengths, dtype=torch.int32), k, requests, row_starts=begins
    )
    assert result.dtype == torch.int32
    for row in range(ROWS):
        start = 0 if starts is None else starts[row]
        entries = table[row if requests is None else requests[row]]
        wanted = [int(entries[start + index]) for index in selected(x[row], start, lengths[row], k)]
        assert result[row].tolist() == wanted + [-1] * (k - len(wanted))


@given(
    lengths=LENGTHS,
    k=st.integers(1, 50),
    starts=st.one_of(st.none(), LENGTHS),
    first_entries=st.one_of(st.none(), st.lists(st.integers(0, 12), min_size=ROWS, max_size=ROWS)),
    page_size=st.sampled_from([1, 4, 64]),
    strided=st.booleans(),
    with_raw=st.booleans(),
)
def test_page_table_transform_of_pages(lengths, k, starts, first_entries, page_size, strided, with_raw):
    """Entries beyond the table, and negative ones, select nothing."""
    x, generator = scores(), torch.Generator().manual_seed(2)
    table = torch.randint(-1, 1000, (ROWS, 20), generator=generator, dtype=torch.int32)
    starts = None if first_entries is None and page_size > 1 else starts
    begins = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    if starts is not None and first_entries is None:
        first_entries = starts
    out, raw = (torch.full((ROWS, 2 * k if strided else k), -9, dtype=torch.int32)[:, :k] for _ in range(2))
    result = flashinfer.top_k_page_table_transform(
        x,
        table,
        torch.tensor(lengths, dtype=torch.int32),
        k,
        row_starts=begins,
        page_table_row_starts=None if first_entries is None else torch.tensor(first_entries),
        page_size=page_size,
        out=out,
        out_raw_indices=raw if with_raw else None,
    )
    assert result is out
    for row in range(ROWS):
        wanted = selected(x[row], 0 if starts is None else starts[row], lengths[row], k)
        slots = []
        for index in wanted:
            entry = (0 if first_entries is None else first_entries[row]) + index // page_size
            page = int(table[row, entry]) if entry < 20 else -1
            slots.append(page * page_size + index % page_size if page >= 0 else -1)
        assert not with_raw or raw[row].tolist() == wanted + [-1] * (k - len(wanted))
        assert result[row].tolist() == slots + [-1] * (k - len(wanted))


@pytest.mark.parametrize("shared", [False, True])
def test_slots_are_written_in_one_launch_without_starts(monkeypatch, shared):
    monkeypatch.setattr(topk, "index_convert", None)
    x, lengths, out = scores(), torch.arange(ROWS) * 8, torch.zeros(ROWS, 5, dtype=torch.int32)
    table = torch.randint(-1, 1000, (2 if shared else ROWS, 5), dtype=torch.int32)
    requests = torch.tensor([0, 1, 1, -1, 2, 0]) if shared else None
    wanted = flashinfer.top_k_page_table_transform(x, table, lengths, 5, requests, page_size=8)
    assert flashinfer.top_k_page_table_transform(x, table, lengths, 5, requests, page_size=8, out=out) is out
    assert out.equal(wanted)
    with pytest.raises(TypeError, match="not callable"):
        flashinfer.top_k_page_table_transform(x, table, lengths, 5, requests, page_table_row_starts=lengths)


def test_first_entries_of_pages():
    """Without them entries begin where scores do, if both have the same unit."""
    x, lengths, starts = scores(), torch.full((ROWS,), 5), torch.full((ROWS,), 3)
    table = torch.arange(WIDTH, dtype=torch.int32).expand(ROWS, -1) * 7
    alone = flashinfer.top_k_page_table_transform(x, table, lengths, 5, row_starts=starts)
    assert alone.equal(
        flashinfer.top_k_page_table_transform(x, table, lengths, 5, row_starts=starts, page_table_row_starts=starts)
    )
    with pytest.raises(ValueError, match=r"^page_table_row_starts must be given with row_starts and a page_size above"):
        flashinfer.top_k_page_table_transform(x, table, lengths, 5, row_starts=starts, page_size=2)
    with pytest.raises(ValueError, match=r"^page_size must be at least 1, got 0"):
        flashinfer.top_k_page_table_transform(x, table, lengths, 5, page_size=0)
    with pytest.raises(ValueError, match=r"^out must have shape \[6, 5\]"):
        flashinfer.top_k_page_table_transform(x, table, lengths, 5, out=torch.zeros(6, 4, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"^out_raw_indices must be int32, got int64"):
        flashinfer.top_k_page_table_transform(x, table, lengths, 5, out_raw_indices=torch.zeros(6, 5).long())


def test_equal_entries_with_smaller_indices_win():
    x = torch.zeros(2, 9)
    assert flashinfer.top_k(x, 4, tie_break=TopKTieBreak.SMALL)[1].tolist() == [[0, 1, 2, 3]] * 2
    with pytest.raises(
        ValueError, match=r"tie_break must be TopKTieBreak.NONE or SMALL, as smaller indices win, got 2"
    ):
        flashinfer.top_k(x, 4, tie_break=TopKTieBreak.LARGE)


def test_refusals():
    x, offsets = scores(), torch.zeros(ROWS, dtype=torch.int32)
    with pytest.raises(ValueError, match="k must be at most input's width 40, got 41"):
        flashinfer.top_k(x, 41)
    with pytest.raises(TypeError, match="input must be float32 or bfloat16 or float16, got float64"):
        flashinfer.top_k(x.double(), 4)
    with pytest.raises(ValueError, match=r"offsets must have shape \[6\]"):
        flashinfer.top_k_ragged_transform(x, offsets[:5], offsets, 4)
    with pytest.raises(ValueError, match=r"lengths must have shape \[6\]"):
        flashinfer.top_k_page_table_transform(x, offsets.view(-1, 1), offsets[:5], 4)
    with pytest.raises(ValueError, match=r"^src_page_table must have input's 6 rows without row_to_batch, got 5$"):
        flashinfer.top_k_page_table_transform(x, offsets[:5].view(-1, 1), offsets, 4)
    with pytest.raises(ValueError, match=r"^out must share no memory with src_page_table"):
        flashinfer.top_k_page_table_transform(x, table := offsets.repeat(4).view(6, 4), offsets, 4, out=table)
    with pytest.raises(ValueError, match=r"row_to_batch must have shape \[6\]"):
        flashinfer.top_k_page_table_transform(x, offsets.view(-1, 1), offsets, 4, offsets[:5])
