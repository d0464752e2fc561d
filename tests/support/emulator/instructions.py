"""Turns instructions of PTX into functions of a warp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from support.emulator import arithmetic, control, lanes, loads_and_stores, matrices, mbarriers, tensor_cores, transfers
from support.emulator.elements import STORED, Array, spread
from support.emulator.machine import Fault, Machine, Warp
from support.emulator.operands import reader, writer
from support.emulator.program import Instruction, vector

# Instructions without effect in this emulator.
_WITHOUT_EFFECT = {
    *("fence", "membar", "setmaxnreg", "griddepcontrol", "prefetch", "prefetchu", "nanosleep", "applypriority"),
}
_CONTROL = {
    "bra": control.branch,
    "brx": control.branch,
    "ret": control.leave,
    "exit": control.leave,
    "bar": control.barrier,
    "barrier": control.barrier,
}
_PLAIN = {
    "ld": loads_and_stores.load,
    "st": loads_and_stores.store,
    "atom": loads_and_stores.atomic,
    "red": loads_and_stores.atomic,
    "ldmatrix": matrices.load_matrix,
    "stmatrix": matrices.store_matrix,
    "mma": tensor_cores.mma,
    "wgmma": tensor_cores.wgmma,
    "cp": transfers.copy,
    "mbarrier": mbarriers.arrive,
    "shfl": lanes.shuffle,
    "redux": lanes.reduce,
    "vote": lanes.vote,
    "elect": lanes.elect,
}


def build(machine: Machine, ins: Instruction) -> tuple[Callable[..., None], tuple[int, bool] | None, bool]:
    """The function of an instruction, its guard, and whether it is a control-flow instruction.

    The function of other instructions takes a warp and the mask of the lanes that execute it (None for all). That of a
    control-flow instruction takes a warp, the lanes that are at the instruction, and those that execute it, and
    advances the warp.
    """
    if ins.name in _CONTROL:
        return _CONTROL[ins.name](machine, ins), ins.guard, True
    if ins.name == "mbarrier" and ("try_wait" in ins.modifiers or "test_wait" in ins.modifiers):
        return mbarriers.test(machine, ins), ins.guard, True
    return _plain(machine, ins), ins.guard, False


def _plain(machine: Machine, ins: Instruction) -> Callable[[Warp, Array | None], None]:
    name, modifiers = ins.name, ins.modifiers
    if name == "fence" and "proxy" in modifiers:
        return lambda warp, mask: warp.ordering.fence(machine.clock)
    if name == "trap":
        return _trap
    if name in _WITHOUT_EFFECT:
        return lambda warp, mask: None
    if name == "st" and modifiers[0] == "async":
        return transfers.store_async(machine, ins)
    if name in _PLAIN:
        return _PLAIN[name](machine, ins)
    if name == "mapa":
        return _map_to_rank(machine, ins)
    if name == "createpolicy":
        write = writer(machine, ins, ins.operands[0])
        return lambda warp, mask: write(warp, np.uint64(0), mask)
    if name == "mov" and ins.operands[0].startswith("{"):
        return _unpack(machine, ins)
    if name == "mov" and ins.operands[1].startswith("{"):
        return _pack(machine, ins)
    return _compute(machine, ins)


def _trap(warp: Warp, mask: Array | None) -> None:
    raise Fault("the kernel stops itself")


def _compute(machine: Machine, ins: Instruction) -> Callable[[Warp, Array | None], None]:
    function, types = arithmetic.operation(ins)
    target, _, negated = ins.operands[0].partition("|")
    write = writer(machine, ins, target)
    sources = [reader(machine, ins, operand, kind) for operand, kind in zip(ins.operands[1:], types, strict=True)]
    if negated:
        write_negated = writer(machine, ins, negated)

        def both(warp: Warp, mask: Array | None) -> None:
            result = function(*[source(warp) for source in sources])
            write(warp, result, mask)
            write_negated(warp, ~result, mask)

        return both
    return lambda warp, mask: write(warp, function(*[source(warp) for source in sources]), mask)


def _map_to_rank(machine: Machine, ins: Instruction) -> Callable[[Warp, Array | None], None]:
    write = writer(machine, ins, ins.operands[0])
    own, rank = (reader(machine, ins, operand, np.uint32) for operand in ins.operands[1:])

    def run(warp: Warp, mask: Array | None) -> None:
        write(warp, spread(own(warp)) | ((spread(rank(warp)) + np.uint32(1)) << np.uint32(24)), mask)

    return run


def _unpack(machine: Machine, ins: Instruction) -> Callable[[Warp, Array | None], None]:
    """mov.b32 {low, high}, whole"""
    names = vector(ins.operands[0])
    whole = int(ins.modifiers[-1][1:])
    bits = whole // len(names)
    read = reader(machine, ins, ins.operands[1], STORED[whole])
    writes = [writer(machine, ins, name) for name in names]

    def run(warp: Warp, mask: Array | None) -> None:
        value = spread(read(warp))
        for i, write in enumerate(writes):
            write(warp, (value >> STORED[whole](bits * i)).astype(STORED[bits]), mask)

    return run


def _pack(machine: Machine, ins: Instruction) -> Callable[[Warp, Array | None], None]:
    """mov.b32 whole, {low, high}"""
    names = vector(ins.operands[1])
    kind: Any = STORED[int(ins.modifiers[-1][1:])]
    bits = 8 * np.dtype(kind).itemsize // len(names)
    reads = [reader(machine, ins, name, STORED[bits]) for name in names]
    write = writer(machine, ins, ins.operands[0])

    def run(warp: Warp, mask: Array | None) -> None:
        parts = [spread(read(warp)).astype(kind) << kind(bits * i) for i, read in enumerate(reads)]
        write(warp, np.bitwise_or.reduce(parts), mask)

    return run
