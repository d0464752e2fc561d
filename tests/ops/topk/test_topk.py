"""Top-k compared with sorting in Python, on rows of every kind, on every backend."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.marks import mostly_full
from support.topk_rows import KINDS, rows_of
from support.torch_op import opcheck

from flashlatte.ops.topk import api, topk
from flashlatte.ops.topk.reference import TopkParams
from flashlatte.runtime import dispatch

BACKENDS = ["reference", *(pytest.param(name, marks=pytest.mark.interpreter) for name in ("portable", "hopper"))]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def oracle(row, first, last, k):
    """Indices relative to ``first`` of the k largest entries, ascending: by value, NaN lowest, lower indices first
    among ties."""
    entries = row[first:last]
    order = sorted(range(len(entries)), key=lambda i: (entries[i] == entries[i], entries[i], -i), reverse=True)
    nan = [i for i in range(len(entries)) if entries[i] != entries[i]]
    numbers = [i for i in order if entries[i] == entries[i]]
    return sorted((numbers + nan)[:k])


def run(logits, k, start, end, next_n, backend):
    if backend != "hopper":
        return topk(logits, k, start=start, end=end, next_n=next_n, return_values=True, backend=backend)
    # Dispatch takes the interpreter for no Hopper.
    indices = torch.full((len(logits), k), -7, dtype=torch.int32)
    values = torch.full((len(logits), k), torch.nan)
    dispatch.implementation("topk", "hopper")(TopkParams(logits, start, end, next_n, indices, values))
    return indices, values


def check(logits, k, start, end, next_n, backend):
    rows, width = logits.shape
    indices, values = run(logits, k, start, end, next_n, backend)
    assert indices.dtype == torch.int32
    for row in range(rows):
        first = 0 if start is None else min(max(int(start[row]), 0), width)
        if end is None:
            last = width
        elif len(end) == rows:
            last = int(end[row])
        else:
            last = int(end[row // next_n]) - next_n + 1 + row % next_n
        expected = oracle(logits[row].tolist(), first, max(min(last, width), first), k)
        assert indices[row].tolist() == expected + [-1] * (k - len(expected))
        chosen = logits[row, first:][torch.tensor(expected, dtype=torch.long)].float()
        torch.testing.assert_close(values[row, : len(expected)], chosen, rtol=0, atol=0, equal_nan=True)
        assert values[row, len(expected) :].eq(-torch.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", mostly_full(KINDS, "normal", "equal", "nan"))
def test_rows_of_every_kind(kind, backend):
    # Wider than the candidate buffer, so that rows are sampled.
    check(rows_of(kind, 2, 9000, 5), 100, None, None, 1, backend)
    check(rows_of(kind, 2, 700, 6), 100, None, None, 1, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 6),
    width=st.sampled_from([1, 7, 300, 1024, 1025, 5000, 12000]),
    k=st.sampled_from([1, 2, 64, 257, 600]),
    with_start=st.booleans(),
    ends=st.sampled_from(["none", "rows", "requests"]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    gap=st.sampled_from([0, 3]),
    seed=st.integers(0, 1000),
)
def test_against_sorting(backend, kind, rows, width, k, with_start, ends, index_dtype, dtype, gap, seed):
    next_n = 2 if ends == "requests" else 1
    rows *= next_n
    logits = torch.full((rows, width + gap), torch.inf)
    logits[:, :width] = rows_of(kind, rows, width, seed)
    logits = logits.to(dtype)[:, :width]
    start = end = None
    if with_start:
        start = torch.randint(-3, width + 3, (rows,), generator=generator(seed)).to(index_dtype)
        start[0] = 0
    if ends != "none":
        end = torch.randint(-3, width + 3, (rows // next_n,), generator=generator(seed + 1)).to(index_dtype)
        end[0] = (width, width + 1000, 2**31 - 1)[seed % 3]
    check(logits, k, start, end, next_n, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_smallest_int64_ends_no_row(backend):
    check(torch.ones(6, 5), 3, None, torch.tensor([-(2**63), 4]), 3, backend)


@pytest.mark.full
@pytest.mark.interpreter
@pytest.mark.parametrize("chunks", [1, 3, 16])
def test_chunks_and_scratch_do_not_change_the_result(chunks, monkeypatch):
    from flashlatte.ops.topk.portable import launch

    monkeypatch.setattr(launch, "MAX_CHUNKS", chunks)
    monkeypatch.setattr(launch, "PROGRAMS_PER_SM", 1000)
    monkeypatch.setattr(launch, "SMALLEST_CHUNK", 100)
    monkeypatch.setattr(launch, "SCRATCH_BYTES", 8 * 1024 * chunks * 2)
    logits = rows_of("normal", 5, 6000, 1)
    end = torch.tensor([6000, 1030, 5999, 3, 2500])
    check(logits, 50, None, end, 1, "portable")


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", mostly_full(["normal", "concentrated", "equal", "mostly zero"], "normal", "equal"))
def test_many_rows(kind, monkeypatch):
    from flashlatte.ops.topk.portable import launch

    monkeypatch.setattr(launch, "PROGRAMS_PER_SM", 0)
    check(rows_of(kind, 3, 5000, 2), 100, None, torch.tensor([5000, 1500, 70]), 1, "portable")


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("equal", "zeros", "mostly zero", "infinite")])
def test_a_sample_gives_candidates_that_will_do(kind, monkeypatch):
    """Rows without many ties are read once. (Rows that defeat the sample by construction are read again.)"""
    from flashlatte.ops.topk.portable import launch

    k, rows = 64, 3
    totals = []

    def finish(_, candidates, *others):
        totals.extend(candidates.counts.view(-1, candidates.chunks).sum(dim=1).tolist())

    monkeypatch.setattr(launch, "_finish", finish)
    topk(rows_of(kind, rows, 9000, 1), k, backend="portable")
    assert len(totals) == rows
    assert all(k <= total <= launch.MIN_CAPACITY for total in totals)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_sorted(backend):
    logits = torch.tensor([[1.0, torch.nan, 5.0, 1.0, -torch.inf, 5.0, 2.0, torch.inf], [3.0] * 8])
    end = torch.tensor([8, 3])
    indices, values = topk(logits, 8, end=end, sort=True, return_values=True, backend=backend)
    assert indices.tolist() == [[7, 2, 5, 6, 0, 3, 4, 1], [0, 1, 2, -1, -1, -1, -1, -1]]
    assert values[0, :7].tolist() == [torch.inf, 5.0, 5.0, 2.0, 1.0, 1.0, -torch.inf]
    assert values[0, 7].isnan()
    assert values[1].tolist() == [3.0] * 3 + [-torch.inf] * 5


def test_a_set_as_torch_topk_gives():
    logits = torch.randn(20, 3000, generator=generator(0))
    expected = logits.topk(200, dim=1).indices.sort(dim=1).values
    assert topk(logits, 200).equal(expected.int())


def test_outputs_given():
    logits = torch.randn(4, 50, generator=generator(0))
    indices = torch.full((4, 12), -7, dtype=torch.int32)[:, :10]
    values = torch.zeros(4, 10)
    result = topk(logits, 10, indices=indices, values=values)
    assert result[0] is indices
    assert result[1] is values
    assert topk(logits, 10).equal(indices)


def test_no_rows():
    assert topk(torch.empty(0, 5), 3).shape == (0, 3)


def call(**change):
    return topk(**({"logits": torch.zeros(4, 50), "k": 5, "end": torch.full((4,), 50)} | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(4, 50, dtype=torch.float16)}, TypeError, "logits must be float32 or bfloat16"),
        ({"logits": torch.zeros(4)}, ValueError, "logits must have shape"),
        ({"k": 0}, ValueError, "k must be at least 1, got 0"),
        ({"k": 5000}, ValueError, "k must be at most 4096, got 5000"),
        ({"next_n": 3}, ValueError, "next_n must divide the 4 rows of logits, got 3"),
        ({"end": torch.full((2,), 50)}, ValueError, r"end must have shape \[4\]"),
        ({"start": torch.zeros(4)}, TypeError, "start must be int32 or int64"),
        ({"indices": torch.zeros(4, 5, dtype=torch.int64)}, TypeError, "indices must be int32"),
        ({"values": torch.zeros(4, 4)}, ValueError, r"values must have shape \[4, 5\]"),
        ({"sort": 1}, TypeError, "sort must be True or False"),
        ({"backend": "hopper"}, ValueError, "hopper"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        call(**change)


def test_values_that_are_a_part_of_the_logits_are_refused():
    logits = torch.zeros(4, 50)
    with pytest.raises(ValueError, match=r"^values must share no memory with logits"):
        topk(logits, 5, values=logits[:, :5])


def test_opcheck():
    opcheck(api, "topk", call)
