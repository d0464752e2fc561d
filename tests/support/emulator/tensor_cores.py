"""Products of matrices: mma of a warp, and WGMMA of a warpgroup with operands in shared memory."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from support.emulator.elements import BYTES, FROM, STORED, Array, spread
from support.emulator.machine import Fault, Machine, Warp
from support.emulator.matrices import COLUMN, ROW
from support.emulator.operands import reader, scalar, writer
from support.emulator.program import Instruction, vector
from support.emulator.tensor_maps import swizzled

Run = Callable[[Warp, "Array | None"], None]


def _fill(matrix: Array, row: Array, column: Array, register: Array, kind: str) -> None:
    """Unpack a register into neighboring columns of a matrix."""
    bits = 8 * BYTES[kind]
    for i in range(32 // bits):
        part = spread(register) >> np.uint32(bits * i)
        if bits < 32:
            part &= np.uint32(2**bits - 1)
        matrix[row, column + i] = FROM[kind](part.astype(STORED[bits]))


def _left(registers: list[Array], depth: int, kind: str) -> Array:
    """The left operand [16, depth] of a warp, in four registers of each lane (two, if depth is one register wide)."""
    matrix = np.zeros((16, depth), np.float32)
    per_register = 4 // BYTES[kind]
    half = 2 * depth // len(registers)
    for i, register in enumerate(registers):
        _fill(matrix, ROW + 8 * (i % 2), half * (i // 2) + COLUMN // 2 * per_register, register, kind)
    return matrix


def _result(product: Array, i: int) -> Array:
    """Register i of a product [16, columns]: two neighboring columns of two rows, then the next eight columns."""
    return np.ascontiguousarray(product[ROW + 8 * (i // 2 % 2), 8 * (i // 4) + COLUMN + i % 2])


def _add_e4m3(sums: Array, products: Array) -> Array:
    """Add products [..., depth] of e4m3 operands to float32 ``sums`` as Hopper does: align all of them to the largest,
    and keep 14 bits of each, truncated toward 0 (docs/notes/dense-decode-fp8.md)."""
    terms = np.concatenate((products, sums[..., None]), -1)
    _, exponent = np.frexp(np.abs(terms).max(-1, keepdims=True))
    added = np.ldexp(np.trunc(np.ldexp(terms, 14 - exponent)), exponent - 14).sum(-1, dtype=np.float32)
    return np.where(np.isfinite(terms).all(-1), added, terms.sum(-1))


def mma(machine: Machine, ins: Instruction) -> Run:
    """mma.sync.aligned.m16n8kK.row.col with sums in float32."""
    shape = next(found for modifier in ins.modifiers if (found := re.fullmatch(r"m16n8k(\d+)", modifier)))
    depth = int(shape[1])
    left, right = ins.modifiers[ins.modifiers.index("col") + 2 :][:2]
    writes = [writer(machine, ins, name) for name in vector(ins.operands[0])]
    a, b = ([reader(machine, ins, name, np.uint32) for name in vector(operand)] for operand in ins.operands[1:3])
    added = [reader(machine, ins, name, np.float32) for name in vector(ins.operands[3])]

    def run(warp: Warp, mask: Array | None) -> None:
        columns = np.zeros((8, depth), np.float32)
        for i, read in enumerate(b):
            _fill(columns, ROW, depth // len(b) * i + COLUMN // 2 * (4 // BYTES[right]), read(warp), right)
        product = _left([read(warp) for read in a], depth, left) @ columns.T
        for i, (write, read) in enumerate(zip(writes, added, strict=True)):
            write(warp, spread(read(warp)) + _result(product, i), mask)

    return run


def wgmma(machine: Machine, ins: Instruction) -> Run:
    if ins.modifiers[0] == "fence":
        return lambda warp, mask: None
    if ins.modifiers[0] == "commit_group":
        return _commit
    if ins.modifiers[0] == "wait_group":
        remaining = int(ins.operands[-1])
        return lambda warp, mask: _wait(warp, remaining)
    return _Wgmma(machine, ins).run


def _commit(warp: Warp, mask: Array | None) -> None:
    warp.product_groups.append(warp.products)
    warp.products = []


def _wait(warp: Warp, remaining: int) -> None:
    while len(warp.product_groups) > remaining:
        for check in warp.product_groups.popleft():
            check()


class _Wgmma:
    """wgmma.mma_async.m64nNkK. Each warp computes its 16 rows when it issues the instruction, and verifies at its wait
    that the operands in shared memory are still the same."""

    def __init__(self, machine: Machine, ins: Instruction) -> None:
        position, shape = next(
            (i, found)
            for i, modifier in enumerate(ins.modifiers)
            if (found := re.fullmatch(r"m64n(\d+)k(\d+)", modifier))
        )
        sums, self._left, self._right = ins.modifiers[position + 1 : position + 4]
        self._columns, self._depth = int(shape[1]), int(shape[2])
        self._targets = [slot for name in vector(ins.operands[0]) if (slot := ins.slot(name)) is not None]
        left = ins.operands[1]
        self._registers = [reader(machine, ins, name, np.uint32) for name in vector(left)] if "{" in left else None
        self._left_map = reader(machine, ins, left, np.uint64) if self._registers is None else None
        self._right_map = reader(machine, ins, ins.operands[2], np.uint64)
        self._adds = reader(machine, ins, ins.operands[3], np.bool_)
        sign_a, sign_b, *transposed = (int(operand) for operand in ins.operands[4:])
        if (sums, sign_a, sign_b) != ("f32", 1, 1):
            raise NotImplementedError(ins.text)
        self._right_transposed = bool(transposed and transposed[-1])
        self._left_transposed = bool(len(transposed) > 1 and transposed[0])

    def run(self, warp: Warp, mask: Array | None) -> None:
        if mask is not None:
            raise Fault("some lanes only issue a WGMMA")
        right = self._operand(warp, scalar(self._right_map(warp)), self._columns, self._right, self._right_transposed)
        if self._registers is not None:
            left = _left([read(warp) for read in self._registers], self._depth, self._left)
        else:
            assert self._left_map is not None
            rows = slice(16 * (warp.index % 4), 16 * (warp.index % 4) + 16)
            left = self._operand(warp, scalar(self._left_map(warp)), 64, self._left, self._left_transposed, rows)
        adds = bool(scalar(self._adds(warp)))
        is_e4m3 = self._left == "e4m3"
        product = left[:, None] * right if is_e4m3 else left @ right.T
        for i, slot in enumerate(self._targets):
            value = _result(product, i)
            sums = warp.registers[slot].view(np.float32) if adds else np.zeros(len(value), np.float32)
            value = _add_e4m3(sums, value) if is_e4m3 else sums + value
            warp.registers[slot] = value.view(np.uint32)

    def _operand(
        self, warp: Warp, descriptor: int, rows: int, kind: str, transposed: bool, part: slice = slice(None)
    ) -> Array:
        size, cta = BYTES[kind], warp.cta
        offsets = operand_offsets(descriptor, rows, self._depth, size, transposed)[part]
        cta.offsets(offsets.ravel(), size)
        cta.check_proxy(warp, offsets.ravel() // 4, "WGMMA")
        values = cta.words[size][offsets // size]

        def check() -> None:
            if not np.array_equal(cta.words[size][offsets // size], values):
                raise Fault("shared memory changed before a WGMMA that reads it was waited for")

        warp.products.append(check)
        return FROM[kind](values)


def operand_offsets(descriptor: int, rows: int, depth: int, size: int, transposed: bool) -> Array:
    """Offsets [rows, depth] in shared memory of the elements of an operand with a matrix descriptor (PTX, "Matrix
    Descriptor Format").

    Elements have ``size`` bytes. Elements along the depth are neighbors, or with ``transposed`` those along the rows.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    swizzle = (0, 128, 64, 32)[descriptor >> 62 & 3]
    if descriptor >> 49 & 7 or (transposed and not swizzle):
        raise NotImplementedError(f"matrix descriptor {descriptor:#x}")
    row, column = np.arange(rows)[:, None], np.arange(depth)[None, :]
    if transposed:
        per_row = swizzle // size
        offsets = row // per_row * leading + column // 8 * stride + column % 8 * swizzle + row % per_row * size
    elif swizzle:
        offsets = row // 8 * stride + row % 8 * swizzle + column * size
    else:
        byte = column * size
        offsets = row // 8 * stride + byte // 16 * leading + row % 8 * 16 + byte % 16
    return swizzled(start + offsets, swizzle)
