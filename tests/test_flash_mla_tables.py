"""Block tables that are slices of a wider buffer: FlashMLA reads as many columns as the lengths require."""

import pytest
import torch
from support.flash_mla_calls import decode

from flashlatte.testing.cases import DenseDecodeCase

ROWS, COLUMNS, FIRST = 3, 5, 2


@pytest.fixture
def inputs():
    return DenseDecodeCase(ROWS, 1, COLUMNS * 64, 4).inputs()


def buffer_of(table, *, rows=ROWS, columns=COLUMNS):
    """A buffer with the table in its first columns; other entries are not in the cache."""
    buffer = table.new_full((rows, columns), 10**6)
    buffer[: table.shape[0], : table.shape[1]] = table
    return buffer


def cut_buffer(table):
    """A view as of a buffer with columns behind the table, whose storage ends with the table's last entry."""
    stride = COLUMNS + 3
    storage = table.new_full((stride * (ROWS - 1) + COLUMNS,), 10**6)
    view = storage.as_strided(table.shape, (stride, 1))
    return view.copy_(table)


def behind_other_columns(table):
    buffer = table.new_full((ROWS, FIRST + COLUMNS), 10**6)
    buffer[:, FIRST:] = table
    return buffer[:, FIRST:]


@pytest.mark.parametrize("columns", [1, 2, COLUMNS])
@pytest.mark.parametrize(
    "place",
    [
        buffer_of,
        lambda table: buffer_of(table, rows=ROWS + 1, columns=COLUMNS + 4),
        cut_buffer,
        behind_other_columns,
    ],
    ids=["exact", "wider", "storage ends", "behind other columns"],
)
def test_a_slice_stands_for_whole_rows(inputs, place, columns):
    table = inputs["block_table"]
    narrow = place(table)[:ROWS, :columns]
    for given, expected in zip(decode(inputs, block_table=narrow), decode(inputs), strict=True):
        assert given.equal(expected)


def test_nothing_behind_the_storage_is_read(inputs):
    """A length beyond the whole row means the row."""
    narrow, lengths = cut_buffer(inputs["block_table"])[:, :1], torch.full((ROWS,), 10**6, dtype=torch.int32)
    for given, expected in zip(
        decode(inputs, block_table=narrow[-1:], cache_seqlens=lengths[-1:], q=inputs["q"][-1:]),
        decode(inputs, cache_seqlens=lengths),
        strict=True,
    ):
        assert given[0].equal(expected[-1])


def test_a_table_without_columns_is_refused(inputs):
    with pytest.raises(ValueError, match=r"^block_table must have shape \[3, max_pages\] with no empty axis, got"):
        decode(inputs, block_table=torch.zeros(ROWS, 0, dtype=torch.int32))


def test_a_slice_in_a_compiled_program(inputs):
    buffer = buffer_of(inputs["block_table"])
    compiled = torch.compile(lambda table: decode(inputs, block_table=table), backend="eager", fullgraph=True)
    for given, expected in zip(compiled(buffer[:, :1]), decode(inputs), strict=True):
        assert given.equal(expected)
