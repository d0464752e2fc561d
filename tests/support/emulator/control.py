"""Branches and barriers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from support.emulator.elements import LANES, Array, spread
from support.emulator.machine import Fault, Machine, Warp
from support.emulator.operands import reader, scalar
from support.emulator.ordering import Ordering
from support.emulator.program import Instruction

Control = Callable[[Warp, "Array | None", "Array | None"], None]


def _go(warp: Warp, mask: Array | None, active: Array | None, targets: Array | int) -> None:
    """Lanes of ``active`` jump; the other lanes of ``mask`` continue with the next instruction."""
    if warp.lane_pcs is None and (active is None or active.all()) and isinstance(targets, int):
        warp.pc = targets
        return
    pcs = np.full(LANES, warp.pc) if warp.lane_pcs is None else warp.lane_pcs
    stay = pcs + 1 if mask is None else np.where(mask, pcs + 1, pcs)
    warp.jump(np.where(True if active is None else active, targets, stay))


def branch(machine: Machine, ins: Instruction) -> Control:
    if ins.name == "brx":
        table = np.array([ins.scope.label(label) for label in machine.program.tables[ins.operands[1]]])
        index = reader(machine, ins, ins.operands[0], np.uint32)
        return lambda warp, mask, active: _go(warp, mask, active, table[spread(index(warp)).astype(np.int64)])
    target = ins.scope.label(ins.operands[0])
    return lambda warp, mask, active: _go(warp, mask, active, target)


def leave(machine: Machine, ins: Instruction) -> Control:
    # The end of the code, where ``Machine`` ends the warp.
    target = len(machine.program.instructions)
    return lambda warp, mask, active: _go(warp, mask, active, target)


class NamedBarrier:
    """A named barrier: arrivals so far, and waiting warps."""

    def __init__(self) -> None:
        self.threads = 0
        self.waiting: list[Warp] = []
        self.ordering = Ordering()

    def arrive(self, warp: Warp, expected: int, name: str, waits: bool) -> bool:
        """Returns whether the barrier is complete, in which case all waiting warps continue and it is reset."""
        self.threads += LANES
        warp.ordering.arrive(self.ordering, warp.cta.machine.clock)
        if waits:
            warp.waits_for = name
            self.waiting.append(warp)
        if self.threads > expected:
            raise Fault(f"{self.threads} threads arrive at {name}, which expects {expected}")
        if self.threads == expected:
            for other in self.waiting:
                other.waits_for = None
                other.ordering.join(self.ordering)
        return self.threads == expected


def barrier(machine: Machine, ins: Instruction) -> Control:
    if ins.modifiers[0] == "warp":
        return lambda warp, mask, active: warp.advance(mask)
    if ins.modifiers[0] == "cluster":
        return _cluster_arrive if "arrive" in ins.modifiers else _cluster_wait
    number = reader(machine, ins, ins.operands[0], np.uint32)
    threads = reader(machine, ins, ins.operands[1], np.uint32) if len(ins.operands) > 1 else None
    waits = "arrive" not in ins.modifiers

    def run(warp: Warp, mask: Array | None, active: Array | None) -> None:
        warp.advance(mask)
        if active is not None and not active.any():
            return
        key = scalar(number(warp))
        expected = machine.program.threads if threads is None else scalar(threads(warp))
        if warp.cta.barriers.setdefault(key, NamedBarrier()).arrive(warp, expected, f"barrier {key}", waits):
            del warp.cta.barriers[key]

    return run


class ClusterPhase(NamedTuple):
    """A phase of the barrier of a cluster."""

    number: int
    barrier: NamedBarrier
    before: NamedBarrier | None


def _cluster_arrive(warp: Warp, mask: Array | None, active: Array | None) -> None:
    first = warp.cta.cluster[0]
    phase = first.cluster_barrier or ClusterPhase(1, NamedBarrier(), None)
    first.cluster_barrier = phase
    warp.cluster_phase = phase.number
    warp.advance(mask)
    threads = LANES * sum(len(cta.warps) for cta in warp.cta.cluster)
    if phase.barrier.arrive(warp, threads, "the cluster", waits=False):
        first.cluster_barrier = ClusterPhase(phase.number + 1, NamedBarrier(), phase.barrier)


def _cluster_wait(warp: Warp, mask: Array | None, active: Array | None) -> None:
    phase = warp.cta.cluster[0].cluster_barrier
    warp.advance(mask)
    if phase.number == warp.cluster_phase:
        warp.waits_for = "the cluster"
        phase.barrier.waiting.append(warp)
    else:
        warp.ordering.join(phase.before.ordering)
