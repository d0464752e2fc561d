"""The PTX that stages rows of a WGMMA result in shared memory, executed for the threads of four warps."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from flashlatte.kernels.hopper.ptx import staged_rows

STRIDE = staged_rows.STAGED_STRIDE.value
# Shared memory does not begin at address 0.
START = 1024


def _element(thread: int, number: int) -> tuple[int, int]:
    """The row and column of an element of a thread: two of every eight columns, alternating between two rows."""
    warp, lane = divmod(thread, 32)
    return warp * 16 + lane // 4 + number // 2 % 2 * 8, number // 4 * 8 + lane % 4 * 2 + number % 2


def _stores(elements: int, first: int, columns: int) -> list[dict[int, tuple[int, list[tuple[int, int]]]]]:
    """For each store instruction, the address and the elements of each thread."""
    code = str(staged_rows._stage_asm(elements, first, columns)).strip("{} ")
    stores = []
    registers: list[dict[str, int]] = [{"%laneid": thread % 32, "global_smem": START} for thread in range(128)]
    unused = elements // 4
    for thread, own in enumerate(registers):
        for number in range(elements):
            own[f"${unused + elements + number}"] = _element(thread, number)[0] * STRIDE
    for line in (part.strip() for part in code.split(";")):
        if not line or line.startswith(".reg"):
            continue
        name, rest = line.split(" ", 1)
        if name == "st.shared.v2.f32":
            base, offset, one, two = re.findall(r"\w+", rest)
            numbers = [int(one) - unused, int(two) - unused]
            stores.append(
                {
                    thread: (own[base] + int(offset), [_element(thread, number) for number in numbers])
                    for thread, own in enumerate(registers)
                }
            )
            continue
        target, *sources = rest.split(", ")
        for own in registers:
            values = [own[source] if source in own else int(source) for source in sources]
            own[target] = {
                "mov.u32": lambda x: x,
                "and.b32": lambda x, y: x & y,
                "shl.b32": lambda x, y: x << y,
                "add.u32": lambda x, y: x + y,
            }[name](*values)
    return stores


@pytest.mark.parametrize(("elements", "first", "columns"), [(128, 0, 128), (128, 128, 128), (32, 0, 64)])
def test_every_column_of_every_row(elements, first, columns):
    memory = {}
    for store in _stores(elements, first, columns):
        for address, values in store.values():
            memory |= {address + 4 * i: value for i, value in enumerate(values)}
    assert memory == {
        START + row * STRIDE + 4 * column: (row, first + column) for row in range(64) for column in range(columns)
    }


def test_no_bank_conflicts():
    """Half a warp stores 128 bytes at a time."""
    for store in _stores(128, 0, 128):
        for half in range(0, 128, 16):
            banks = {store[thread][0] // 4 % 32 + i for thread in range(half, half + 16) for i in range(2)}
            assert len(banks) == 32


def test_rows_are_aligned_for_tma():
    assert STRIDE % 16 == 0
    assert 4 * staged_rows.STAGED_COLUMNS.value <= STRIDE
