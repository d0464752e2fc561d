"""Exchange between the lanes of a warp."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from support.emulator.elements import LANE, LANES, TYPES, Array, spread, type_of
from support.emulator.machine import Machine, Warp
from support.emulator.operands import reader, scalar, writer
from support.emulator.program import Instruction

Run = Callable[[Warp, "Array | None"], None]


def shuffle(machine: Machine, ins: Instruction) -> Run:
    mode = next(modifier for modifier in ins.modifiers if modifier in ("bfly", "up", "down", "idx"))
    target, _, found = ins.operands[0].partition("|")
    write = writer(machine, ins, target)
    write_found = writer(machine, ins, found or "_")
    value, amount, limits = (reader(machine, ins, operand, np.uint32) for operand in ins.operands[1:4])

    def run(warp: Warp, mask: Array | None) -> None:
        distance = spread(amount(warp)).astype(np.int64) & 31
        clamp = scalar(limits(warp))
        segment = clamp >> 8 & 31
        last = (LANE & segment) | (clamp & 31 & ~segment)
        source = {
            "up": LANE - distance,
            "down": LANE + distance,
            "bfly": LANE ^ distance,
            "idx": (LANE & segment) | (distance & ~segment),
        }[mode]
        inside = source >= last if mode == "up" else source <= last
        write(warp, spread(value(warp))[np.where(inside, source, LANE)], mask)
        write_found(warp, inside, mask)

    return run


def reduce(machine: Machine, ins: Instruction) -> Run:
    functions = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    function = next(functions[modifier] for modifier in ins.modifiers if modifier in functions)
    value = reader(machine, ins, ins.operands[1], TYPES[type_of(ins.modifiers)])
    write = writer(machine, ins, ins.operands[0])

    def run(warp: Warp, mask: Array | None) -> None:
        given = spread(value(warp))
        active = given if mask is None else given[mask]
        write(warp, np.full(LANES, function.reduce(active, dtype=given.dtype)), mask)

    return run


def vote(machine: Machine, ins: Instruction) -> Run:
    mode = next(modifier for modifier in ins.modifiers if modifier in ("all", "any", "ballot"))
    negated = ins.operands[1].startswith("!")
    value = reader(machine, ins, ins.operands[1].removeprefix("!"), np.bool_)
    write = writer(machine, ins, ins.operands[0])

    def run(warp: Warp, mask: Array | None) -> None:
        given = spread(value(warp)) ^ negated
        active = np.full(LANES, True) if mask is None else mask
        if mode == "ballot":
            write(warp, np.uint32(((given & active).astype(np.int64) << LANE).sum()), mask)
        else:
            write(warp, np.bool_({"all": np.all, "any": np.any}[mode](given[active])), mask)

    return run


def elect(machine: Machine, ins: Instruction) -> Run:
    target, _, elected = ins.operands[0].partition("|")
    write, write_elected = writer(machine, ins, target), writer(machine, ins, elected)

    def run(warp: Warp, mask: Array | None) -> None:
        first = 0 if mask is None else int(np.argmax(mask))
        write(warp, np.uint32(first), mask)
        write_elected(warp, first == LANE, mask)

    return run
