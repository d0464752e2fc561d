"""mbarriers in shared memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from support.emulator.elements import LANES, Array, spread
from support.emulator.machine import Fault, Machine, Warp
from support.emulator.operands import address, reader, writer
from support.emulator.ordering import Ordering
from support.emulator.program import Instruction


class Mbarrier:
    """
    Attributes:
        pending: arrivals that the phase still expects. ``transactions``: bytes that it still expects.
        phases: number of complete phases.
        released: the ordering established by the arrivals of the last complete phase.
        initializer: number of the warp that initialized it, and the time.
    """

    def __init__(self, warp: Warp, count: int) -> None:
        self.initializer = warp.number, warp.cta.machine.clock
        self.count = self.pending = count
        self.transactions = self.phases = 0
        self.released = Ordering()
        self._arrived = Ordering()

    def arrive(self, warp: Warp, count: int = 1) -> None:
        warp.ordering.arrive(self._arrived, warp.cta.machine.clock)
        self.pending -= count
        if self.pending < 0:
            raise Fault("more threads arrive at an mbarrier than it expects")
        self._complete()

    def transfer(self, size: int) -> None:
        """Bytes have arrived."""
        self.transactions -= size
        self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.transactions == 0:
            self.phases += 1
            self.pending = self.count
            self.released, self._arrived = self._arrived, Ordering()


def mbarrier_at(warp: Warp, where: int) -> Mbarrier:
    cta, offset = warp.cta.resolve(int(where))
    if offset not in cta.mbarriers:
        raise Fault(f"no mbarrier at {offset}")
    mbarrier = cta.mbarriers[offset]
    initializer, time = mbarrier.initializer
    if cta.machine.finds_races and warp.ordering.seen[initializer] < time:
        raise Fault(f"uses an mbarrier that warp {initializer} has initialized, with no barrier between")
    return mbarrier


def arrive(machine: Machine, ins: Instruction) -> Callable[[Warp, Array | None], None]:
    """init, inval, arrive and expect_tx."""
    # An arrival may return the state of the mbarrier first.
    operands = ins.operands if ins.operands[0].startswith("[") else ins.operands[1:]
    where = address(machine, ins, operands[0])
    amount = reader(machine, ins, operands[1], np.uint32) if len(operands) > 1 else None
    expects = any("expect_tx" in modifier for modifier in ins.modifiers)

    def run(warp: Warp, mask: Array | None) -> None:
        for lane in range(LANES) if mask is None else np.flatnonzero(mask):
            number = 1 if amount is None else int(spread(amount(warp))[lane])
            position = int(where(warp)[lane])
            if "init" in ins.modifiers:
                warp.cta.mbarriers[position] = Mbarrier(warp, number)
            elif "inval" in ins.modifiers:
                warp.cta.mbarriers.pop(position, None)
            else:
                mbarrier = mbarrier_at(warp, position)
                if expects:
                    mbarrier.transactions += number
                if "arrive" in ins.modifiers:
                    mbarrier.arrive(warp, 1 if expects else number)

    return run


def test(machine: Machine, ins: Instruction) -> Callable[[Warp, Array | None, Array | None], None]:
    """try_wait and test_wait for the end of a phase of a parity."""
    write = writer(machine, ins, ins.operands[0])
    where = address(machine, ins, ins.operands[1])
    parity = reader(machine, ins, ins.operands[2], np.uint32)

    def run(warp: Warp, mask: Array | None, active: Array | None) -> None:
        lane = 0 if active is None else int(np.argmax(active))
        mbarrier = mbarrier_at(warp, int(where(warp)[lane]))
        complete = mbarrier.phases % 2 != int(spread(parity(warp))[lane]) % 2
        write(warp, np.bool_(complete), active)
        warp.advance(mask)
        if complete:
            warp.ordering.join(mbarrier.released)
            warp.failed_tests = 0
        else:
            warp.failed_tests += 1

    return run
