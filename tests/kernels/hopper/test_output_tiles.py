"""The shuffles before 16-byte stores, emulated for the 32 threads of a warp."""

from __future__ import annotations

import operator
import re
from typing import Any

import pytest

pytest.importorskip("triton")

from flashlatte.kernels.hopper.ptx import output_tiles

LANES = range(32)
# Addresses of output rows, and the bytes stored of each.
ROW = 4096
STORED = 512


def run(assembly: str, operands: list[dict[str, Any]]) -> dict[int, list[Any]]:
    """The stores of a warp, by address."""
    threads = [dict(own) for own in operands]
    memory: dict[int, list[Any]] = {}
    for line in str(assembly).strip("{} ").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        predicate, name, rest = re.fullmatch(r"\s*(?:@(\w+) )?([\w.]+) (.*)", line).groups()  # type: ignore[union-attr]
        first, *others = [word.strip() for word in re.split(r",(?![^{]*})", rest)]
        before = [dict(thread) for thread in threads]
        for lane, thread in enumerate(threads):
            own = before[lane]
            if predicate is not None and not own[predicate]:
                continue
            if name == "mov.u32":
                thread[first] = lane
            elif name == "mul.wide.u32":
                thread[first] = own[others[0]] * int(others[1])
            elif name == "add.u64":
                thread[first] = own[others[0]] + own[others[1]]
            elif name == "and.b32":
                thread[first] = own[others[0]] & int(others[1])
            elif name.startswith("setp.ne"):
                thread[first] = operator.ne(own[others[0]], int(others[1]))
            elif name == "selp.b32":
                thread[first] = own[others[0] if own[others[2]] else others[1]]
            elif name == "shfl.sync.bfly.b32":
                thread[first] = before[lane ^ int(others[1])][others[0]]
            else:
                assert name == "st.global.v4.b32"
                register, _, offset = first.strip("[]").partition(" + ")
                address = own[register] + int(offset)
                assert address % 16 == 0
                memory[address] = [own[word.strip()] for word in others[0].strip("{}").split(",")]
    return memory


@pytest.mark.parametrize("unused_rows", [(), (2, 11)])
def test_store_rows_writes_every_pair_of_columns(unused_rows):
    operands = []
    for lane in LANES:
        own: dict[str, Any] = {}
        # A thread holds two of every eight columns of a WGMMA result, alternating between a row and the row eight
        # below.
        for number in range(128):
            row, col = lane // 4 + number // 2 % 2 * 8, number // 4 * 8 + lane % 4 * 2 + number % 2
            own[f"${96 + number}"] = ROW * row
            own[f"${224 + number}"] = int(row not in unused_rows)
            if number % 2 == 0:
                own[f"${32 + number // 2}"] = (row, col)
        operands.append(own)
    stored = run(str(output_tiles._store_rows_asm()), operands)
    assert len(stored) == (16 - len(unused_rows)) * STORED // 16
    for address, pairs in stored.items():
        row, byte = divmod(address, ROW)
        assert pairs == [(row, byte // 2 + offset) for offset in (0, 2, 4, 6)]
