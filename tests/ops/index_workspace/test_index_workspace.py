"""Rows of a workspace compared with a loop in Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_op import opcheck

from flashlatte import index_workspace
from flashlatte.ops.index_workspace import api
from flashlatte.runtime import machine

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernel).
pytestmark = [pytest.mark.interpreter] if machine.interpreting() else []


def walk(chosen, begins, lengths, gathers, tokens, window, ratio, workspace_rows, window_row, topk):
    """The rows of each token, without padding."""
    found: list[list[int]] = [[] for _ in range(tokens)]
    for request, length in enumerate(lengths):
        count = begins[request + 1] - begins[request]
        for i in range(count):
            token = begins[request] - begins[0] + i
            position = length - count + i
            if token >= tokens or position < 0:
                continue
            base = request * workspace_rows
            for entry in range(min((position + 1) // ratio, topk)):
                group = entry if chosen is None else chosen[token][entry]
                found[token].append(base + group if 0 <= group < workspace_rows else -1)
            for p in range(max(0, position - window + 1), position + 1):
                at = p - (length - gathers[request])
                found[token].append(base + window_row + at if 0 <= at < workspace_rows - window_row else -1)
    return [[row if row < 2**31 else -1 for row in rows] for rows in found]


@given(
    spans=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=4),
    window=st.sampled_from([0, 1, 5, 130]),
    ratio=st.sampled_from([1, 4, 7]),
    topk=st.sampled_from([1, 6, 125]),
    first=st.sampled_from([0, 11]),
    select=st.booleans(),
    gather=st.booleans(),
    padding=st.integers(0, 2),
    workspace_rows=st.sampled_from([22, 50, 2**30]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 1000),
)
def test_against_a_walk(spans, window, ratio, topk, first, select, gather, padding, workspace_rows, dtype, seed):
    begins = [first]
    for count, _, _ in spans:
        begins.append(begins[-1] + count)
    # The last request may have more tokens than its length, which is invalid input.
    lengths = [count + before - (3 if before == 13 else 0) for count, before, _ in spans]
    gathers = [min(length, count + more) for (count, _, more), length in zip(spans, lengths, strict=True)]
    tokens = begins[-1] - first + padding
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(-2, 30, (tokens, topk + 1), generator=generator).to(dtype)[:, :topk] if select else None
    rows, counts = index_workspace(
        indices,
        torch.tensor(begins, dtype=dtype),
        torch.tensor(lengths, dtype=dtype),
        tokens,
        window=window,
        ratio=ratio,
        workspace_rows=workspace_rows,
        window_row=20,
        topk=None if select else topk,
        gather_lens=torch.tensor(gathers) if gather else None,
        backend=BACKEND,
    )
    chosen = None if indices is None else indices.tolist()
    gathers = gathers if gather else lengths
    expected = walk(chosen, begins, lengths, gathers, tokens, window, ratio, workspace_rows, 20, topk)
    assert rows.shape == (tokens, -(-(topk + window) // 128) * 128)
    assert counts.tolist() == [len(row) for row in expected]
    for row, wanted in zip(rows.tolist(), expected, strict=True):
        assert row == wanted + [-1] * (len(row) - len(wanted))


def test_the_smallest_int64_is_no_length():
    lengths, boundaries = torch.tensor([-(2**63), 9]), torch.tensor([0, 2, 4])
    layout: dict[str, Any] = {"window": 3, "ratio": 4, "workspace_rows": 20, "window_row": 4}
    rows, counts = index_workspace(None, boundaries, lengths, 4, topk=2, **layout, backend=BACKEND)
    assert counts.tolist() == [0, 0, 5, 5]
    assert rows[:2].eq(-1).all()


@pytest.mark.parametrize("entry", [16, 2**31 - 1, 2**63 - 1])
def test_rows_of_another_request_are_none(entry):
    indices = torch.tensor([[entry, 15]])
    cu_seqlens, lengths = torch.tensor([0, 0, 1]), torch.tensor([0, 40])
    sizes = {"window": 20, "ratio": 1, "workspace_rows": 16, "window_row": 4}
    rows, counts = index_workspace(indices, cu_seqlens, lengths, 1, gather_lens=lengths, **sizes, backend=BACKEND)
    assert rows[0, :2].tolist() == [-1, 16 + 15]
    assert rows[0, 2:].tolist() == [-1] * 126
    assert counts.tolist() == [22]


def call(**change):
    arguments: dict[str, Any] = {
        "indices": torch.zeros(3, 4, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1, 3]),
        "seq_lens": torch.tensor([8, 9]),
        "total_tokens": 3,
        "window": 4,
        "ratio": 4,
        "workspace_rows": 16,
        "window_row": 4,
    }
    return index_workspace(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"total_tokens": 4}, ValueError, r"^indices must have shape \[4, topk\]"),
        ({"indices": torch.zeros(3, 4)}, TypeError, "^indices must be int32 or int64"),
        ({"indices": None}, ValueError, "^exactly one of indices and topk must be given, got neither$"),
        ({"topk": 4}, ValueError, "^exactly one of indices and topk must be given, got both$"),
        ({"cu_seqlens_q": torch.tensor([0, 3])}, ValueError, r"^cu_seqlens_q must have shape \[3\]"),
        ({"gather_lens": torch.tensor([1])}, ValueError, r"^gather_lens must have shape \[2\]"),
        ({"window": -1}, ValueError, "^window must be at least 0, got -1$"),
        ({"ratio": 0}, ValueError, "^ratio must be at least 1, got 0$"),
        ({"window_row": 17}, ValueError, "^window_row must be at most workspace_rows 16, got 17$"),
        ({"workspace_rows": 2**31}, ValueError, "^workspace_rows must be at most 2147483647, as rows are int32"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        call(**change)


@pytest.mark.skipif(machine.interpreting(), reason="the reference's")
def test_opcheck():
    opcheck(api, "index_workspace", call)
