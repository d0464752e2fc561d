"""The last tokens of requests in a workspace, compared with a loop over tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import kv_cache
from flashlatte.kv_cache.registry import as_format
from flashlatte.runtime import machine

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernels).
pytestmark = [pytest.mark.interpreter] if machine.interpreting() else []


@given(
    lengths=st.lists(st.integers(0, 11), min_size=1, max_size=4),
    rows=st.integers(1, 9),
    offset=st.integers(0, 9),
    some=st.booleans(),
    form=st.sampled_from(["model1", "bf16", "v32"]),
    seed=st.integers(0, 1000),
)
def test_against_a_loop(lengths, rows, offset, some, form, seed):
    generator = torch.Generator().manual_seed(seed)
    offset, page_size, layout = min(offset, rows), 3, as_format(form)
    cache = kv_cache.pack(torch.randn(20, page_size, 1, layout.head_dim, generator=generator), layout)
    table = torch.randperm(20, generator=generator)[: 4 * len(lengths)].view(len(lengths), -1).int()
    counts = [int(n) for n in torch.randint(-1, 13, (len(lengths),), generator=generator)] if some else lengths
    tokens = kv_cache.unpack(cache, dtype=torch.float32)
    expected = torch.full((len(lengths), rows, layout.head_dim), 7.0)
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        wanted = range(length - min(max(count, 0), length), length)
        for row, token in enumerate(wanted[: rows - offset]):
            page = int(table[request, token // page_size])
            expected[request, offset + row] = tokens[page, token % page_size, 0]
    out = torch.full_like(expected, 7.0)
    result = kv_cache.gather_last(
        cache,
        table,
        torch.tensor(lengths),
        out,
        gather_lens=torch.tensor(counts) if some else None,
        offset=offset,
        backend=BACKEND,
    )
    assert result is out
    assert out.equal(expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seq_lens": torch.zeros(3)}, TypeError, "^seq_lens must be int32 or int64"),
        ({"out": torch.zeros(2, 4, 576)[:, :3]}, ValueError, "^out must have no gap between requests"),
        ({"out": torch.zeros(3, 4, 576)}, ValueError, r"^out must have shape \[2, rows, head_dim\]"),
        ({"offset": 5}, ValueError, "^offset must be at most out's 4 rows, got 5$"),
        ({"gather_lens": torch.zeros(3, dtype=torch.int32)}, ValueError, r"^gather_lens must have shape \[2\]"),
        ({"block_table": torch.zeros(3, 1).int()}, ValueError, r"^block_table must have shape \[2, max_pages\]"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    lengths = torch.tensor([3, 2])
    table = torch.zeros(2, 1, dtype=torch.int32)
    arguments = {"block_table": table, "seq_lens": lengths, "out": torch.zeros(2, 4, 576), **change}
    with pytest.raises(error, match=message):
        kv_cache.gather_last(kv_cache.allocate("bf16", 2, 4), **arguments)


def test_ends_must_fit():
    with pytest.raises(ValueError, match=r"^seq_ends must have shape \[2\]"):
        kv_cache.gather(
            kv_cache.allocate("bf16", 2, 4),
            torch.zeros(2, 1, dtype=torch.int32),
            torch.tensor([0, 1, 2]),
            seq_ends=torch.zeros(3, dtype=torch.int32),
        )
