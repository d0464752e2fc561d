"""A grid of CTAs that run one kernel, and the order in which their warps run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from support.emulator.elements import LANE, LANES, STORED, Array
from support.emulator.global_memory import GlobalMemory
from support.emulator.ordering import MAX_WARPS, Ordering
from support.emulator.program import Program

SHARED_BYTES = 232_448
# Shared memory of rank r of a cluster begins at (r + 1) · this; an address below is of the CTA's own.
CTA_WINDOW = 1 << 24
# A kernel's parameters: 256 bytes each.
PARAMETERS = 1 << 36
# Maximum number of turns of all warps without progress.
_PATIENCE = 300
_TURN = range(8, 200)
_TICKS_PER_TURN = 25
# Instructions that all lanes of a warp execute together, also after a branch that some have taken.
_CONVERGENT = {*("bar", "barrier", "shfl", "redux", "vote", "elect", "wgmma", "mma", "ldmatrix", "stmatrix")}


class Fault(Exception):
    """An error of the emulated kernel."""


class Warp:
    """
    Attributes:
        registers: array of lanes for each register slot; arbitrary values at first.
        pc: index of the next instruction; None after the end. ``lane_pcs``: that of each lane, if they differ.
        waits_for: description of the barrier or copy that the warp waits for, or None.
        copies, copy_groups: cp.async that have not been committed; groups that have not been waited for.
        stores, store_groups: the same for bulk stores.
        products, product_groups: the same for WGMMA: functions that check that the operands are unchanged.
        failed_tests: number of consecutive unsuccessful tests of an mbarrier.
    """

    def __init__(self, cta: Cta, index: int) -> None:
        machine = cta.machine
        noise = machine.random.integers(0, 2**64, LANES, dtype=np.uint64)
        start = {bits: noise.astype(STORED[bits]) for bits in STORED}
        self.cta, self.index, self.number = cta, index, cta.rank * (MAX_WARPS // 8) + index
        self.registers: list[Array] = [start[bits] for bits in machine.program.bits]
        self.pc: int | None = 0
        self.lane_pcs: Array | None = None
        self.waits_for: str | None = None
        self.thread = (index * LANES + LANE).astype(np.uint32)
        self.ordering = Ordering(self.number)
        self.copies: list[Callable[[], None]] = []
        self.copy_groups: deque[list[Callable[[], None]]] = deque()
        self.stores: list[Callable[[], None]] = []
        self.store_groups: deque[list[Callable[[], None]]] = deque()
        self.products: list[Callable[[], None]] = []
        self.product_groups: deque[list[Callable[[], None]]] = deque()
        self.failed_tests = 0
        self.cluster_phase = 0

    def advance(self, mask: Array | None) -> None:
        """Advance to the next instruction with the lanes of ``mask``, or with all."""
        if self.lane_pcs is None or mask is None:
            assert self.pc is not None
            self.pc += 1
        else:
            self.jump(np.where(mask, self.lane_pcs + 1, self.lane_pcs))

    def jump(self, lane_pcs: Array) -> None:
        if (lane_pcs == lane_pcs[0]).all():
            self.pc, self.lane_pcs = int(lane_pcs[0]), None
        else:
            self.pc, self.lane_pcs = int(lane_pcs.min()), lane_pcs


class Cta:
    """
    Attributes:
        rank: rank in the cluster, whose CTAs are ``cluster``.
        words: shared memory as unsigned integers, by their size in bytes.
        mbarriers: mbarriers by address. ``barriers``: named barriers by number.
    """

    def __init__(self, machine: Machine, number: int, rank: int) -> None:
        self.machine, self.number, self.rank = machine, number, rank
        self.cluster: list[Cta] = [self]
        # Not a number in every floating-point format.
        self.shared = np.full(SHARED_BYTES, 0xFF, np.uint8)
        self.words = {size: self.shared.view(f"u{size}") for size in (1, 2, 4, 8)}
        self.writes = np.zeros((2, SHARED_BYTES // 4), np.int64)
        self.mbarriers: dict[int, Any] = {}
        self.barriers: dict[int, Any] = {}
        self.cluster_barrier: Any = None
        self.warps = [Warp(self, index) for index in range(machine.program.threads // LANES)]

    @property
    def ended(self) -> bool:
        return all(warp.pc is None for warp in self.warps)

    def resolve(self, address: int) -> tuple[Cta, int]:
        """The CTA that a shared address belongs to, and the offset in its shared memory."""
        window, offset = divmod(address, CTA_WINDOW)
        return (self.cluster[window - 1] if window else self), offset

    def offsets(self, addresses: Array, size: int) -> tuple[Cta, Array]:
        """The same for lanes that access ``size`` aligned bytes each, all in one CTA."""
        offsets = addresses % CTA_WINDOW
        if (offsets % size).any() or (offsets + size > SHARED_BYTES).any() or (addresses < 0).any():
            raise Fault(f"bad shared addresses {addresses} of {size} bytes")
        return self.resolve(int(addresses[0]))[0], offsets

    def parts(self, addresses: Array, mask: Array | None) -> list[tuple[Array | None, Array]]:
        """Lanes of a mask by the CTA that they access: (mask, addresses of its lanes)."""
        windows = addresses // CTA_WINDOW
        active = windows if mask is None else windows[mask]
        if (active == active[0]).all():
            return [(mask, addresses if mask is None else addresses[mask])]
        masks = [(windows == window) & (True if mask is None else mask) for window in np.unique(active)]
        return [(part, addresses[part]) for part in masks]

    def record_write(self, warp: Warp, words: Array, same: Array | None = None) -> None:
        """Record that ``warp`` has written these words. ``same``: mask of words that already had the written value."""
        tag = self.machine.clock * MAX_WARPS + warp.number
        changed = words if same is None else words[~same]
        self.writes[0, changed], self.writes[1, changed] = tag, 0
        if same is not None:
            self.writes[1, words[same]] = tag

    def check_read(self, warp: Warp, words: Array) -> None:
        if self.machine.finds_races and (writer := warp.ordering.unseen_writer(self.writes[:, words])) is not None:
            raise Fault(f"reads shared memory that warp {writer} has written, with no barrier between")

    def check_proxy(self, warp: Warp, words: Array, reader: str) -> None:
        if (writer := warp.ordering.unfenced_writer(self.writes[:, words])) is not None:
            raise Fault(f"{reader} reads what warp {writer} has written, with no fence.proxy.async between")


class Machine:
    """Runs a kernel.

    Args:
        shared_bytes: bytes of shared memory of a CTA.
        seed: seed of the order of warps, and of the times of asynchronous copies.
        late: whether asynchronous copies take place at random times; otherwise immediately.
        finds_races: whether to check that a barrier precedes reads of data that another warp has written.

    Attributes:
        parameters: the bytes of each parameter. ``tensor_maps``: the TMA descriptors among them.
        variables: offset of the static variables in shared memory.
    """

    def __init__(
        self, program: Program, memory: GlobalMemory, shared_bytes: int, *, seed: int, late: bool, finds_races: bool
    ) -> None:
        from support.emulator.instructions import build

        self.program, self.memory, self.shared_bytes = program, memory, shared_bytes
        self.late, self.finds_races = late, finds_races
        # Static variables follow what Triton allocates.
        self.variables = -(-shared_bytes // 128) * 128
        self.random = np.random.default_rng(seed)
        self.parameters: dict[int, bytes] = {}
        self.tensor_maps: dict[int, Any] = {}
        self.grid = (1, 1, 1)
        self.clock = 1
        self._ticks = 0
        self._events: list[tuple[int, Callable[[], None]]] = []
        self._code = [build(self, instruction) for instruction in program.instructions]
        self._converges = [instruction.name in _CONVERGENT for instruction in program.instructions]

    def run(self, grid: tuple[int, int, int], cluster: int = 1, resident: int = 16) -> None:
        """Run all CTAs, ``resident`` of them at a time."""
        self.grid = grid
        waiting = deque(range(0, grid[0] * grid[1] * grid[2], cluster))
        running: list[Cta] = []
        idle_turns = 0
        while waiting or running:
            while waiting and len(running) < resident:
                running += self._cluster(waiting.popleft(), cluster)
            warps = [warp for cta in running for warp in cta.warps]
            self.random.shuffle(warps)
            progress = [self._turn(warp) for warp in warps]
            progress.append(self._fire())
            if any(cta.ended for cta in running):
                self._end(running)
                running = [cta for cta in running if not all(peer.ended for peer in cta.cluster)]
            idle_turns = 0 if any(progress) else idle_turns + 1
            if idle_turns > _PATIENCE:
                raise Fault(f"all warps wait:\n{self._positions(running)}")
        while self._events:
            self._fire(all_of_them=True)

    def at_some_time(self, function: Callable[[], None]) -> None:
        if self.late:
            self._events.append((self._ticks + int(self.random.integers(0, 400)), function))
        else:
            function()

    def _cluster(self, first: int, size: int) -> list[Cta]:
        ctas = [Cta(self, first + rank, rank) for rank in range(size)]
        for cta in ctas:
            cta.cluster = ctas
        return ctas

    def _end(self, running: list[Cta]) -> None:
        for warp in (warp for cta in running if cta.ended for warp in cta.warps):
            for group in (*warp.store_groups, warp.stores):
                for store in group:
                    store()
            warp.store_groups, warp.stores = deque(), []

    def _fire(self, all_of_them: bool = False) -> bool:
        """Perform the asynchronous copies that are due. Returns whether any were due or are pending."""
        self._ticks += _TICKS_PER_TURN
        due = [event for event in self._events if all_of_them or event[0] <= self._ticks]
        pending = bool(self._events)
        self._events = [event for event in self._events if event not in due]
        for _, function in due:
            function()
        return pending

    def _turn(self, warp: Warp) -> bool:
        """Run some instructions of a warp. Returns whether it made progress."""
        start = self.clock
        for _ in range(int(self.random.integers(_TURN.start, _TURN.stop))):
            if warp.pc is None or warp.waits_for is not None:
                break
            if warp.failed_tests:
                # Test again, at most once per turn.
                tested, warp.failed_tests = warp.failed_tests, 0
                self._step(warp)
                self._step(warp)
                if warp.failed_tests:
                    warp.failed_tests += tested
                    return False
                continue
            self._step(warp)
            if warp.failed_tests:
                break
        return self.clock > start

    def _step(self, warp: Warp) -> None:
        if warp.lane_pcs is not None:
            warp.pc = self._next_of_lanes(warp.lane_pcs)
        assert warp.pc is not None
        if warp.pc >= len(self._code):
            warp.pc = None
            return
        mask = None if warp.lane_pcs is None else warp.lane_pcs == warp.pc
        function, guard, is_control = self._code[warp.pc]
        self.clock += 1
        try:
            if guard is not None:
                predicate = warp.registers[guard[0]]
                predicate = ~predicate if guard[1] else predicate
                active = predicate if mask is None else predicate & mask
            else:
                active = mask
            if is_control:
                function(warp, mask, active)
                return
            if active is None or active.all():
                function(warp, None)
            elif active.any():
                function(warp, active)
        except Exception as error:
            position = f"CTA {warp.cta.number}, warp {warp.index}: {self.program.instructions[warp.pc].text}"
            if isinstance(error, Fault):
                raise Fault(f"{error}\n  in {position}") from error
            raise RuntimeError(f"{error!r} in {position}") from error
        warp.advance(mask)

    def _next_of_lanes(self, lane_pcs: Array) -> int:
        """The first instruction that lanes of a warp are at and can execute without the others."""
        running = np.unique(lane_pcs[lane_pcs < len(self._code)])
        if len(running) > 1:
            running = running[[not self._converges[pc] for pc in running]]
        if not len(running):
            raise Fault("lanes of a warp wait for each other at different instructions")
        return int(running[0])

    def _positions(self, running: list[Cta]) -> str:
        return "\n".join(
            f"CTA {cta.number}, warp {warp.index}, for {warp.waits_for}: {self.program.instructions[warp.pc].text}"
            for cta in running[:2]
            for warp in cta.warps
            if warp.pc is not None
        )
