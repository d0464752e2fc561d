"""ldmatrix and stmatrix: 8 · 8 elements of 16 bits between shared memory and the registers of a warp."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from support.emulator.elements import LANE, Array, halves, pack, spread
from support.emulator.machine import Machine, Warp
from support.emulator.operands import address, reader, writer
from support.emulator.program import Instruction, vector

Run = Callable[[Warp, "Array | None"], None]

# The row of a matrix that a lane holds, and the first of its two columns.
ROW, COLUMN = LANE // 4, LANE % 4 * 2


def load_matrix(machine: Machine, ins: Instruction) -> Run:
    where = address(machine, ins, ins.operands[1])
    writes = [writer(machine, ins, name) for name in vector(ins.operands[0])]
    transposed = "trans" in ins.modifiers

    def run(warp: Warp, mask: Array | None) -> None:
        addresses = where(warp)
        for i, write in enumerate(writes):
            cta, rows = warp.cta.offsets(addresses[8 * i : 8 * i + 8], 16)
            cta.check_read(warp, (rows[:, None] // 4 + np.arange(4)).ravel())
            matrix = cta.words[2][rows[:, None] // 2 + np.arange(8)]
            matrix = matrix.T if transposed else matrix
            write(warp, pack(matrix[ROW, COLUMN], matrix[ROW, COLUMN + 1]), mask)

    return run


def store_matrix(machine: Machine, ins: Instruction) -> Run:
    where = address(machine, ins, ins.operands[0])
    sources = [reader(machine, ins, name, np.uint32) for name in vector(ins.operands[1])]
    transposed = "trans" in ins.modifiers

    def run(warp: Warp, mask: Array | None) -> None:
        addresses = where(warp)
        for i, source in enumerate(sources):
            cta, rows = warp.cta.offsets(addresses[8 * i : 8 * i + 8], 16)
            matrix = np.zeros((8, 8), np.uint16)
            matrix[ROW, COLUMN], matrix[ROW, COLUMN + 1] = halves(spread(source(warp)))
            cta.words[2][rows[:, None] // 2 + np.arange(8)] = matrix.T if transposed else matrix
            cta.record_write(warp, (rows[:, None] // 4 + np.arange(4)).ravel())

    return run
