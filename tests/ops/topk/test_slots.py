"""Top-k with a block table, compared with ``topk`` followed by ``index_convert``, on every backend."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops.topk.test_topk import BACKENDS, generator
from support.topk_rows import rows_of
from support.torch_op import assert_compiles, opcheck

from flashlatte.ops.index_convert import index_convert
from flashlatte.ops.topk import api, topk
from flashlatte.ops.topk.reference import TopkParams
from flashlatte.runtime import dispatch, value_checks

LARGEST = 2**31 - 1


def run(logits, k, start, end, next_n, table, page_size, request_ids, backend):
    """Slots and values."""
    columns, pages = (start, end, next_n), (table, page_size, request_ids)
    if backend != "hopper":
        start, end, next_n = columns
        options = {"block_table": table, "page_size": page_size, "request_ids": request_ids, "return_values": True}
        return topk(logits, k, start=start, end=end, next_n=next_n, **options, backend=backend)
    # Dispatch takes the interpreter for no Hopper.
    slots, values = torch.full((len(logits), k), -7, dtype=torch.int32), torch.full((len(logits), k), torch.nan)
    for outputs in ((slots, None), (slots.clone(), values)):
        dispatch.implementation("topk", "hopper")(TopkParams(logits, *columns, *outputs, *pages))
        assert outputs[0].equal(slots)
    return slots, values


def check(logits, k, start, end, next_n, table, page_size, request_ids, backend):
    positions, expected_values = topk(
        logits, k, start=start, end=end, next_n=next_n, return_values=True, backend="reference"
    )
    expected = index_convert(positions, table, page_size, request_ids=request_ids, next_n=next_n, backend="reference")
    slots, values = run(logits, k, start, end, next_n, table, page_size, request_ids, backend)
    assert slots.dtype == torch.int32
    assert slots.equal(expected)
    assert values.view(torch.int32).equal(expected_values.view(torch.int32))


def table_of(requests, columns, page_size, seed, dtype=torch.int32):
    """Pages of which some are negative, too large, or the last one whose slots fit in part."""
    table = torch.randint(0, 1000, (requests, columns), generator=generator(seed)).to(dtype)
    last = LARGEST // page_size
    special = torch.tensor([-1, -(2**31), LARGEST, last, min(last + 1, LARGEST)], dtype=dtype)
    table[0, : min(columns, 5)] = special.roll(seed)[:columns]
    return table


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    kind=st.sampled_from(["normal", "equal", "nan", "mostly zero"]),
    requests=st.integers(1, 4),
    next_n=st.integers(1, 2),
    width=st.sampled_from([1, 300, 1025, 5000, 9000]),
    k=st.sampled_from([1, 64, 257, 600]),
    page_size=st.sampled_from([1, 7, 64, LARGEST]),
    short=st.booleans(),
    with_start=st.booleans(),
    per_request=st.booleans(),
    by_id=st.booleans(),
    table_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 1000),
)
def test_against_both_operations(
    backend, kind, requests, next_n, width, k, page_size, short, with_start, per_request, by_id, table_dtype, seed
):
    rows = requests * next_n
    logits = rows_of(kind, rows, width, seed)
    start = torch.randint(-3, width // 2 + 1, (rows,), generator=generator(seed)) if with_start else None
    end = torch.randint(-3, width + 3, (requests if per_request else rows,), generator=generator(seed + 1)).int()
    end[0] = width
    columns = max(-(-width // page_size) // (2 if short else 1), 1)
    table = table_of(3 if by_id else requests, columns + 2, page_size, seed, table_dtype)[:, :columns]
    ids = torch.randint(-1, 4, (2 * rows,), generator=generator(seed + 2))[::2] if by_id else None
    check(logits, k, start, end, next_n, table, page_size, ids, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("width", "k"),
    [(4096, 2048), (8192, 2048), (9000, 100), pytest.param(70_000, 2000, marks=pytest.mark.full)],
)
def test_short_and_long_rows(width, k, backend):
    logits = rows_of("normal", 2, width, 3)
    table = table_of(2, -(-width // 64), 64, 2)
    check(logits, k, None, torch.tensor([width, width - 1]), 1, table, 64, None, backend)


@pytest.mark.interpreter
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_rows_that_are_read_again(backend):
    """Rows of ties, whose list overflows."""
    check(rows_of("equal", 2, 9000, 1), 64, None, None, 1, table_of(2, 141, 64, 0), 64, None, backend)


def test_no_request_and_no_page():
    logits = torch.ones(3, 4)
    table = torch.tensor([[5], [6]])
    slots = topk(logits, 4, block_table=table, page_size=2, request_ids=torch.tensor([1, -1, 2]))
    assert slots.tolist() == [[12, 13, -1, -1], [-1] * 4, [-1] * 4]
    assert topk(torch.empty(0, 5), 3, block_table=table[:0], page_size=2).shape == (0, 3)
    assert topk(torch.empty(2, 0), 3, block_table=table, page_size=2).eq(-1).all()


def test_into_given_outputs():
    logits, table = torch.randn(4, 50, generator=generator(0)), table_of(2, 13, 4, 1)
    slots = torch.full((4, 12), -7, dtype=torch.int32)[:, :10]
    found = topk(logits, 10, next_n=2, block_table=table, page_size=4, indices=slots)
    assert found is slots
    assert found.equal(index_convert(topk(logits, 10), table, 4, next_n=2))


def call(**change):
    pages = {"next_n": 2, "block_table": torch.zeros(2, 9).int(), "page_size": 8}
    return topk(**({"logits": torch.zeros(4, 50), "k": 5} | pages | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"block_table": torch.zeros(2, 9)}, TypeError, "block_table must be int32 or int64"),
        ({"block_table": torch.zeros(2).int()}, ValueError, r"block_table must have shape \[b, max_pages\]"),
        ({"block_table": torch.zeros(2, 0).int()}, ValueError, "block_table must"),
        ({"block_table": torch.zeros(3, 9).int()}, ValueError, "logits must have 2 rows for each of block_table's 3"),
        ({"page_size": None}, TypeError, "page_size must be"),
        ({"page_size": 0}, ValueError, "page_size must be at least 1, got 0"),
        ({"page_size": 2**31}, ValueError, "page_size must be at most 2147483647, got 2147483648"),
        ({"request_ids": torch.zeros(2).int()}, ValueError, r"request_ids must have shape \[4\]"),
        ({"request_ids": torch.zeros(4)}, TypeError, "request_ids must be int32 or int64"),
        ({"block_table": None}, ValueError, "page_size must be given only with block_table"),
        (
            {"block_table": None, "page_size": None, "request_ids": torch.zeros(4).int()},
            ValueError,
            "request_ids must be given only with block_table",
        ),
        ({"sort": True}, ValueError, "sort must be False with block_table, got True"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        call(**change)


def test_request_ids_are_checked_on_request(monkeypatch):
    monkeypatch.setattr(value_checks, "ENABLED", True)
    assert call(request_ids=torch.tensor([0, -1, 1, 1])).shape == (4, 5)
    with pytest.raises(ValueError, match=r"^request_ids must hold values from 0 to 1, or -1 for none, got 2 at \[3\]$"):
        call(request_ids=torch.tensor([0, -1, 1, 2]))


def test_opcheck():
    opcheck(api, "topk", call)
    opcheck(api, "topk", lambda: call(request_ids=torch.tensor([0, 1, 1, 0])))


def test_torch_compile():
    logits = torch.randn(4, 50, generator=generator(0))
    assert_compiles(lambda **arguments: (call(**arguments),), {"logits": logits}, {"logits": -logits, "page_size": 8})
