"""Asynchronous copies: cp.async, bulk copies, TMA, and stores to another CTA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from support.emulator.elements import LANES, Array, spread
from support.emulator.global_memory import GLOBAL
from support.emulator.machine import Cta, Fault, Machine, Warp
from support.emulator.mbarriers import mbarrier_at
from support.emulator.operands import address, reader
from support.emulator.program import Instruction, split_operands, vector

Run = Callable[[Warp, "Array | None"], None]


def _lanes(mask: Array | None) -> Any:
    return range(LANES) if mask is None else np.flatnonzero(mask)


def copy(machine: Machine, ins: Instruction) -> Run:
    kind = ins.suffix.removeprefix("reduce.").removeprefix("async.")
    if "prefetch" in kind:
        return lambda warp, mask: None
    if kind.startswith("bulk.tensor"):
        return _tensor_copy(machine, ins)
    if kind.startswith("bulk.commit_group"):
        return _commit("stores", "store_groups")
    if kind.startswith("bulk.wait_group"):
        return _wait("store_groups", int(ins.operands[0]))
    if kind.startswith("bulk"):
        return _bulk_copy(machine, ins)
    if kind.startswith("mbarrier"):
        return _arrive_after_copies(machine, ins)
    if kind.startswith("commit_group"):
        return _commit("copies", "copy_groups")
    if kind.startswith("wait_all"):
        commit, wait = _commit("copies", "copy_groups"), _wait("copy_groups", 0)
        return lambda warp, mask: (commit(warp, mask), wait(warp, mask))[1]
    if kind.startswith("wait_group"):
        return _wait("copy_groups", int(ins.operands[0]))
    return _thread_copy(machine, ins)


def _commit(pending: str, groups: str) -> Run:
    def run(warp: Warp, mask: Array | None) -> None:
        getattr(warp, groups).append(getattr(warp, pending))
        setattr(warp, pending, [])

    return run


def _wait(groups: str, remaining: int) -> Run:
    def run(warp: Warp, mask: Array | None) -> None:
        while len(getattr(warp, groups)) > remaining:
            for function in getattr(warp, groups).popleft():
                function()

    return run


def _thread_copy(machine: Machine, ins: Instruction) -> Run:
    """cp.async of 4 to 16 bytes a thread; missing source bytes are zeros."""
    to, source = (address(machine, ins, operand) for operand in ins.operands[:2])
    size = int(ins.operands[2], 0)
    given = reader(machine, ins, ins.operands[3], np.uint32) if len(ins.operands) > 3 else None

    def run(warp: Warp, mask: Array | None) -> None:
        lanes = np.array(_lanes(mask))
        counts = np.full(LANES, size) if given is None else spread(given(warp))
        cta, offsets = warp.cta.offsets(to(warp)[lanes], size)
        values = np.zeros((len(lanes), size), np.uint8)
        reads = counts[lanes] > 0
        if reads.any():
            begins = machine.memory.checked(source(warp)[lanes][reads] - GLOBAL, size)
            found = machine.memory.words(1)[begins[:, None] + np.arange(size)]
            values[reads] = np.where(np.arange(size) < counts[lanes][reads][:, None], found, 0)

        def land() -> None:
            cta.shared[offsets[:, None] + np.arange(size)] = values
            # Tensor cores read these without a proxy fence. A read that is too early gets the old values.
            cta.writes[:, offsets[:, None] // 4 + np.arange(size // 4)] = 0

        warp.copies.append(land)

    return run


def _arrive_after_copies(machine: Machine, ins: Instruction) -> Run:
    where = address(machine, ins, ins.operands[0])

    def run(warp: Warp, mask: Array | None) -> None:
        copies, warp.copies = warp.copies, []
        mbarriers = [mbarrier_at(warp, where(warp)[lane]) for lane in _lanes(mask)]
        if "noinc" not in ins.modifiers:
            for mbarrier in mbarriers:
                mbarrier.pending += 1

        def land() -> None:
            for function in copies:
                function()
            for mbarrier in mbarriers:
                mbarrier.arrive(warp)

        machine.at_some_time(land)

    return run


def _words(offset: int, size: int) -> Array:
    return np.arange(offset // 4, (offset + size) // 4)


def _store_later(machine: Machine, warp: Warp, cta: Cta, read: Array, store: Callable[[Array], None]) -> None:
    """Call ``store`` with the bytes ``read`` of shared memory, as late as the warp's waits allow."""
    before = cta.shared[read].copy()

    def land() -> None:
        if not np.array_equal(cta.shared[read], before):
            raise Fault("shared memory changed before an asynchronous store had read it")
        store(before)

    if machine.late:
        warp.stores.append(land)
    else:
        land()


def _tensor_copy(machine: Machine, ins: Instruction) -> Run:
    """[shared], [map, {x, y}], [mbarrier] loads; [map, {x, y}], [shared] stores or adds."""
    loads = "complete_tx" in ins.suffix
    tensor = split_operands(ins.operands[1 if loads else 0].strip().removeprefix("[").removesuffix("]"))
    descriptor = reader(machine, ins, tensor[0], np.uint64)
    coordinates = [reader(machine, ins, operand, np.int32) for operand in vector(tensor[1])]
    shared = address(machine, ins, ins.operands[0 if loads else 1])
    barrier = address(machine, ins, ins.operands[2]) if loads else None

    def run(warp: Warp, mask: Array | None) -> None:
        for lane in _lanes(mask):
            # A parameter has 256 bytes of address space.
            box = machine.tensor_maps[int(spread(descriptor(warp))[lane]) >> 8 & 0xFFFF]
            origin = [int(spread(coordinate(warp))[lane]) for coordinate in reversed(coordinates)]
            begin = int(shared(warp)[lane])
            if begin % 128:
                raise Fault(f"TMA at shared address {begin}, which is not a multiple of 128")
            warp.cta.offsets(np.array([begin, begin + box.bytes - 4]), 4)
            where = box.shared_bytes(begin)
            if barrier is not None:
                _load_box(machine, warp, box, origin, where, int(barrier(warp)[lane]))
                continue
            warp.cta.check_proxy(warp, np.unique(where // 4), "TMA")
            store = functools.partial(box.store, machine.memory, origin, adds=ins.modifiers[0] == "reduce")
            _store_later(machine, warp, warp.cta, where, store)

    return run


def _check_running(cta: Cta) -> None:
    if cta.ended:
        raise Fault("a copy arrives in the shared memory of a CTA that has ended")


def _load_box(machine: Machine, warp: Warp, box: Any, origin: list[int], where: Array, barrier: int) -> None:
    values, cta, mbarrier = box.load(machine.memory, origin), warp.cta, mbarrier_at(warp, barrier)

    def land() -> None:
        _check_running(cta)
        cta.shared[where] = values
        cta.writes[:, np.unique(where // 4)] = 0
        mbarrier.transfer(box.bytes)

    machine.at_some_time(land)


def _bulk_copy(machine: Machine, ins: Instruction) -> Run:
    """[to], [from], size, [mbarrier] into shared memory; [to], [from], size out of it, which may add float32."""
    to, source = (address(machine, ins, operand) for operand in ins.operands[:2])
    size = reader(machine, ins, ins.operands[2], np.uint32)
    barrier = address(machine, ins, ins.operands[3]) if "complete_tx" in ins.suffix else None
    adds = ins.modifiers[0] == "reduce"

    def run(warp: Warp, mask: Array | None) -> None:
        for lane in _lanes(mask):
            count, target, begin = int(spread(size(warp))[lane]), int(to(warp)[lane]), int(source(warp)[lane])
            if target % 16 or begin % 16 or count % 16:
                raise Fault(f"bulk copy of {count} bytes from {begin} to {target}")
            if barrier is not None:
                _load_bulk(machine, warp, target, begin, count, int(barrier(warp)[lane]))
                continue
            warp.cta.check_proxy(warp, _words(begin, count), "a bulk store")
            position = int(machine.memory.checked(np.array([target - GLOBAL]), count)[0])

            def store(values: Array, position: int = position) -> None:
                stored = machine.memory.words(1)[position : position + len(values)]
                if adds:
                    stored.view(np.float32)[:] += values.view(np.float32)
                else:
                    stored[:] = values

            _store_later(machine, warp, warp.cta, np.arange(begin, begin + count), store)

    return run


def _load_bulk(machine: Machine, warp: Warp, target: int, begin: int, count: int, barrier: int) -> None:
    """From global memory, or from shared memory to that of another CTA."""
    mbarrier, (cta, offset) = mbarrier_at(warp, barrier), warp.cta.resolve(target)
    if begin >= GLOBAL:
        position = int(machine.memory.checked(np.array([begin - GLOBAL]), count)[0])
        source = machine.memory.words(1)
    else:
        origin, position = warp.cta.resolve(begin)
        origin.check_proxy(warp, _words(position, count), "a bulk copy")
        source = origin.shared

    def land() -> None:
        _check_running(cta)
        cta.shared[offset : offset + count] = source[position : position + count]
        cta.writes[:, _words(offset, count)] = 0
        mbarrier.transfer(count)

    machine.at_some_time(land)


def store_async(machine: Machine, ins: Instruction) -> Run:
    """st.async [to], values, [mbarrier] into the shared memory of a CTA of the cluster."""
    size = int(ins.modifiers[-1][1:]) // 8
    to, barrier = address(machine, ins, ins.operands[0]), address(machine, ins, ins.operands[2])
    sources = [reader(machine, ins, name, np.dtype(f"u{size}").type) for name in vector(ins.operands[1])]

    def run(warp: Warp, mask: Array | None) -> None:
        values = [spread(source(warp)) for source in sources]
        targets, barriers = to(warp), barrier(warp)

        def land() -> None:
            for lane in _lanes(mask):
                cta, offset = warp.cta.resolve(int(targets[lane]))
                for i, value in enumerate(values):
                    cta.words[size][offset // size + i] = value[lane]
                cta.writes[:, _words(offset, size * len(values))] = 0
                mbarrier_at(warp, int(barriers[lane])).transfer(size * len(values))

        machine.at_some_time(land)

    return run
