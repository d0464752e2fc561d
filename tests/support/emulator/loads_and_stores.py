"""Accesses of threads to memory."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
from support.emulator.elements import LANE, LANES, STORED, TYPES, Array, spread, type_of
from support.emulator.machine import PARAMETERS, Machine, Warp
from support.emulator.operands import address, reader, writer
from support.emulator.program import Instruction, vector

Run = Callable[[Warp, "Array | None"], None]


def _is_shared(ins: Instruction) -> bool:
    return any(modifier.startswith("shared") for modifier in ins.modifiers)


def load(machine: Machine, ins: Instruction) -> Run:
    kind = np.dtype(TYPES[type_of(ins.modifiers)])
    size, plain = kind.itemsize, f"u{kind.itemsize}"
    names = vector(ins.operands[0])
    where = address(machine, ins, ins.operands[1])
    writes = [writer(machine, ins, name) for name in names]
    slots = [ins.slot(name) for name in names]
    # A load into a wider register extends the sign.
    wide = [kind if slot is None else np.dtype(STORED[machine.program.bits[slot]]) for slot in slots]
    extended = [f"i{to.itemsize}" if kind.kind == "i" else to for to in wide]

    def put(warp: Warp, i: int, values: Array, mask: Array | None) -> None:
        writes[i](
            warp, values if values.dtype.itemsize == wide[i].itemsize else values.view(kind).astype(extended[i]), mask
        )

    def from_parameters(warp: Warp, mask: Array | None) -> None:
        number, offset = divmod(int(where(warp)[0]) - PARAMETERS, 256)
        for i in range(len(names)):
            values = np.frombuffer(machine.parameters[number], plain, 1, offset + i * size)
            put(warp, i, np.full(LANES, values[0]), mask)

    def from_shared(warp: Warp, mask: Array | None) -> None:
        for part, addresses in warp.cta.parts(where(warp), mask):
            cta, offsets = warp.cta.offsets(addresses, size * len(names))
            cta.check_read(warp, (offsets[:, None] // 4 + np.arange(max(size * len(names) // 4, 1))).ravel())
            for i in range(len(names)):
                values = np.zeros(LANES, plain)
                values[slice(None) if part is None else part] = cta.words[size][offsets // size + i]
                put(warp, i, values, part)

    def from_global(warp: Warp, mask: Array | None) -> None:
        offsets = machine.memory.offsets(where(warp), size * len(names), mask)
        for i in range(len(names)):
            put(warp, i, machine.memory.words(size)[offsets // size + i], mask)

    if "param" in ins.modifiers:
        return from_parameters
    return from_shared if _is_shared(ins) else from_global


def store(machine: Machine, ins: Instruction) -> Run:
    size = np.dtype(TYPES[type_of(ins.modifiers)]).itemsize
    where = address(machine, ins, ins.operands[0])
    sources = [reader(machine, ins, name, STORED[8 * size]) for name in vector(ins.operands[1])]

    def values(warp: Warp, mask: Array | None) -> list[Array]:
        given = [spread(source(warp)) for source in sources]
        return given if mask is None else [value[mask] for value in given]

    def to_shared(warp: Warp, mask: Array | None) -> None:
        for part, addresses in warp.cta.parts(where(warp), mask):
            cta, offsets = warp.cta.offsets(addresses, size * len(sources))
            words = offsets[:, None] // 4 + np.arange(max(size * len(sources) // 4, 1))
            before = cta.words[4][words]
            for i, value in enumerate(values(warp, part)):
                cta.words[size][offsets // size + i] = value
            cta.record_write(warp, words, before == cta.words[4][words])

    def to_global(warp: Warp, mask: Array | None) -> None:
        offsets = machine.memory.offsets(where(warp), size * len(sources), mask)
        offsets = offsets if mask is None else offsets[mask]
        for i, value in enumerate(values(warp, mask)):
            machine.memory.words(size)[offsets // size + i] = value

    return to_shared if _is_shared(ins) else to_global


_ATOMICS = {
    "add": operator.add,
    "min": min,
    "max": max,
    "exch": lambda old, new: new,
    "or": operator.or_,
    "and": operator.and_,
    "cas": lambda old, expected, new: new if old == expected else old,
}


def atomic(machine: Machine, ins: Instruction) -> Run:
    """atom and red, one lane after the other."""
    kind = np.dtype(TYPES[type_of(ins.modifiers)])
    function = next(_ATOMICS[modifier] for modifier in ins.modifiers if modifier in _ATOMICS)
    returns = ins.name == "atom"
    results = vector(ins.operands[0]) if returns else ["_"] * len(vector(ins.operands[1]))
    where = address(machine, ins, ins.operands[returns])
    given = [vector(operand) for operand in ins.operands[returns + 1 :]]
    # A cache policy may follow the values.
    given = [names for names in given if len(names) == len(results)][: 2 if "cas" in ins.modifiers else 1]
    sources = [[reader(machine, ins, name, kind.type) for name in names] for names in given]
    writes = [writer(machine, ins, name) for name in results]

    def at(warp: Warp, words: Array, offsets: Array, lanes: Array, mask: Array | None) -> None:
        for i, write in enumerate(writes):
            values = [spread(operand[i](warp)) for operand in sources]
            old = np.zeros(LANES, kind)
            for lane, position in zip(lanes, offsets // kind.itemsize + i, strict=True):
                old[lane] = words[position]
                words[position] = function(words[position], *(value[lane] for value in values))
            write(warp, old, mask)

    def run(warp: Warp, mask: Array | None) -> None:
        size = kind.itemsize * len(results)
        if _is_shared(ins):
            for part, addresses in warp.cta.parts(where(warp), mask):
                cta, offsets = warp.cta.offsets(addresses, size)
                lanes = LANE if part is None else np.flatnonzero(part)
                at(warp, cta.words[kind.itemsize].view(kind), offsets, lanes, part)
            return
        offsets = machine.memory.offsets(where(warp), size, mask)
        lanes = LANE if mask is None else np.flatnonzero(mask)
        at(warp, machine.memory.words(kind.itemsize).view(kind), offsets[lanes], lanes, mask)

    return run
