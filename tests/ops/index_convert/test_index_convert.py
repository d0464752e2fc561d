"""Conversion of positions to slots, compared with lookups in Python, on both backends."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compile import Recorder, compile_launch
from support.torch_op import opcheck

from flashlatte.kv_cache.sharding import Sharding
from flashlatte.ops.index_convert import api, index_convert, portable
from flashlatte.ops.index_convert.reference import IndexConvertParams
from flashlatte.runtime import machine

BACKENDS = ["reference", pytest.param("portable", marks=pytest.mark.interpreter)]
GARBAGE = (-1, -(2**31), 2**31 - 1, 2**30)


def walk(positions, query, sinks, window, request, table, page_size, workspace, starts, sharding, largest):
    """The row's slots, computed token by token."""
    tokens = []
    if query is not None:
        tokens += [p if p <= query else -1 for p in range(sinks)]
        recent = [query - window + 1 + i for i in range(window)]
        tokens += [p if p >= sinks and query >= 0 else -1 for p in recent]
        patterned = {p for p in tokens if p >= 0}
        positions = [-1 if p in patterned else p for p in positions]
    rank, size, interleave = sharding
    slots = []
    for p in tokens + list(positions):
        slot = -1
        if p >= 0 and workspace is not None and workspace >= 0:
            slot = starts[workspace] + p if workspace < len(starts) else -1
        elif p >= 0 and 0 <= request < len(table) and p // interleave % size == rank:
            local = p // (size * interleave) * interleave + p % interleave
            if local // page_size < len(table[request]) and table[request][local // page_size] >= 0:
                slot = table[request][local // page_size] * page_size + local % page_size
        slots.append(slot if slot <= largest else -1)
    return slots


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    requests=st.integers(1, 4),
    next_n=st.integers(1, 3),
    columns=st.integers(1, 5),
    page_size=st.sampled_from([1, 7, 64]),
    chosen=st.sampled_from([None, 1, 20, 1500]),
    pattern=st.sampled_from([(0, 0), (3, 0), (0, 5), (4, 9)]),
    by_id=st.booleans(),
    workspace=st.booleans(),
    sharding=st.sampled_from([(0, 1, 1), (1, 3, 1), (0, 2, 4), (3, 4, 16)]),
    compact=st.booleans(),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 1000),
)
def test_against_a_walk(
    backend,
    requests,
    next_n,
    columns,
    page_size,
    chosen,
    pattern,
    by_id,
    workspace,
    sharding,
    compact,
    index_dtype,
    dtype,
    seed,
):
    sinks, window = pattern
    if chosen is None and not any(pattern):
        chosen = 3
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    rows = requests * next_n
    reach = columns * page_size * sharding[1]
    indices = None if chosen is None else integers(-3, reach + 4, rows, chosen + 2)[:, :chosen].to(index_dtype)
    if indices is not None:
        indices[:, 0] = GARBAGE[seed % 4]
    table = integers(0, 50, requests, columns)
    table[0, -1] = GARBAGE[seed % 4]
    ids = integers(-1, requests + 1, rows) if by_id else torch.arange(rows) // next_n
    query = integers(-2, reach, rows) if any(pattern) else None
    workspaces = integers(-2, 4, rows) if workspace else None
    starts = integers(0, 1000, 3) if workspace else None
    slots, counts = index_convert(
        indices,
        table.to(index_dtype),
        page_size,
        request_ids=ids.to(index_dtype) if by_id else None,
        next_n=next_n,
        query_positions=query,
        sinks=sinks,
        window=window,
        workspace_ids=workspaces,
        workspace_starts=starts,
        sharding=sharding,
        compact=compact,
        return_counts=True,
        dtype=dtype,
        backend=backend,
    )
    assert slots.dtype == dtype
    for row in range(rows):
        expected = walk(
            [] if indices is None else indices[row].tolist(),
            None if query is None else int(query[row]),
            sinks,
            window,
            int(ids[row]),
            table.tolist(),
            page_size,
            None if workspaces is None else int(workspaces[row]),
            [] if starts is None else starts.tolist(),
            sharding,
            torch.iinfo(dtype).max,
        )
        valid = [slot for slot in expected if slot >= 0]
        if compact:
            expected = valid + [-1] * (len(expected) - len(valid))
        assert slots[row].tolist() == expected
        assert int(counts[row]) == len(valid)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pattern_joined_to_a_selection_has_no_token_twice(backend):
    table = torch.arange(10, dtype=torch.int32).flip(0).unsqueeze(0)
    indices = torch.tensor([[0, 3, 9, 17, 18, 19, -1, 21]])
    slots, counts = index_convert(
        indices,
        table,
        4,
        query_positions=torch.tensor([19]),
        sinks=2,
        window=3,
        compact=True,
        return_counts=True,
        backend=backend,
    )
    expected = [0, 1, 17, 18, 19, 3, 9, 21]
    assert slots[0, :8].tolist() == [(9 - p // 4) * 4 + p % 4 for p in expected]
    assert slots[0, 8:].eq(-1).all()
    assert counts.tolist() == [8]


def test_no_rows():
    table = torch.zeros(2, 3, dtype=torch.int32)
    none = torch.empty(0, 5, dtype=torch.int32)
    ids = torch.empty(0, dtype=torch.int32)
    assert index_convert(none, table, 4, request_ids=ids).shape == (0, 5)


def call(**change):
    arguments = {
        "indices": torch.zeros(2, 5, dtype=torch.int32),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "page_size": 64,
    }
    return index_convert(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"indices": torch.zeros(3, 5, dtype=torch.int32)}, ValueError, "indices must have 1 rows for each of"),
        ({"indices": torch.zeros(2, 5)}, TypeError, "indices must be int32 or int64"),
        ({"indices": None}, ValueError, "indices must be given if sinks and window are 0"),
        ({"sinks": 4}, ValueError, "query_positions must be given with sinks or window"),
        ({"indices": None, "sinks": 4, "query_positions": [19, 3]}, TypeError, "query_positions must be a tensor, got"),
        ({"window": -1}, ValueError, "window must be at least 0, got -1"),
        ({"request_ids": torch.zeros(3, dtype=torch.int32)}, ValueError, r"request_ids must have shape \[2\]"),
        (
            {"workspace_ids": torch.zeros(2, dtype=torch.int32)},
            ValueError,
            "workspace_ids and workspace_starts must be given together",
        ),
        ({"sharding": (2, 2, 1)}, ValueError, "sharding's rank must be below its size 2, got 2"),
        ({"sharding": 3}, TypeError, r"sharding must be \(rank, size, interleave\)"),
        ({"slots": torch.zeros(2, 4, dtype=torch.int32)}, ValueError, r"slots must have shape \[2, 5\]"),
        ({"dtype": torch.int16}, TypeError, "dtype must be int32 or int64"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        call(**change)


def test_sinks_and_window_may_change_in_a_compiled_program():
    table, query = torch.arange(4).view(1, 4), torch.tensor([6])
    compiled = torch.compile(index_convert, fullgraph=True, dynamic=True, backend="eager")
    for sinks in (1, 2):
        given = {"request_ids": torch.tensor([0]), "query_positions": query, "sinks": sinks, "window": 3}
        assert torch.equal(compiled(None, table, 2, **given), index_convert(None, table, 2, **given))


def test_opcheck():
    opcheck(api, "index_convert", call)


@pytest.mark.full
@pytest.mark.skipif(machine.interpreting(), reason="the kernel is interpreted, not compiled")
def test_nothing_is_read_before_the_kernel_ahead_has_ended(monkeypatch):
    monkeypatch.setattr(portable, "launches_overlap", lambda device: True)
    monkeypatch.setattr(portable, "index_convert_kernel", recorder := Recorder(portable.index_convert_kernel))
    chosen, table = torch.zeros(3, 64, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32)
    portable.index_convert(
        IndexConvertParams(
            indices=chosen,
            block_table=table,
            page_size=64,
            request_ids=None,
            next_n=1,
            query_positions=None,
            sinks=0,
            window=0,
            workspace_ids=None,
            workspace_starts=None,
            sharding=Sharding(),
            compact=False,
            slots=torch.empty_like(chosen),
            counts=None,
        )
    )
    (launched,) = recorder.launches
    assert launched.options["launch_pdl"] is True
    sass = compile_launch(recorder.fn, launched, 90).sass
    assert 0 < sass.index("ACQBULK") < sass.index("LDG")
