"""Inline PTX without branches, run for all threads of a CTA at once, each instruction by all of them before the next.

So barriers have nothing to do, and a missing one is not noticed.
"""

from __future__ import annotations

import re

import numpy as np

LANES = 32
_MASK = 0xFFFFFFFF


class Threads:
    """``memory``: the words of shared memory, which begins at address 0."""

    def __init__(self, threads: int, memory: np.ndarray) -> None:
        self.threads, self.memory = threads, memory
        self.registers: dict[str, np.ndarray] = {
            "%tid.x": np.arange(threads),
            "%laneid": np.arange(threads) % LANES,
        }

    def run(self, code: str, **operands: int) -> None:
        """``operands`` by name, as ``_4`` for $4."""
        for name, value in operands.items():
            self.registers[f"${name[1:]}"] = np.full(self.threads, value, np.int64)
        body = code.strip().removeprefix("{").removesuffix("}")
        for line in re.split(r";", re.sub(r"\.reg [^;]*;", "", body)):
            if line.strip():
                self._step(line.strip())

    def _step(self, line: str) -> None:
        active = np.full(self.threads, True)
        if guard := re.match(r"@(!?)(\w+) ", line):
            active = self.registers[guard[2]].astype(bool) ^ (guard[1] == "!")
            line = line[guard.end() :]
        name, _, rest = line.partition(" ")
        operation, *modifiers = name.split(".")
        if operation in ("bar",):
            return
        names = [part.strip() for part in re.split(r",(?![^{]*})", rest)]
        if operation == "ld":
            address = self._address(names[1])
            for i, target in enumerate(names[0].strip("{}").split(",")):
                safe = np.where(active, address // 4 + i, 0)
                self._set(target.strip(), self.memory[safe], active)
        elif operation == "st":
            address = self._address(names[0])
            self.memory[address[active] // 4] = self._get(names[1])[active]
        elif operation == "shfl":
            source, bits = self._get(names[1]), self._get(names[2])
            lane, first = np.arange(self.threads) % LANES, np.arange(self.threads) // LANES * LANES
            wanted = lane - bits if "up" in modifiers else bits & 31
            found = wanted >= 0
            target, _, predicate = names[0].partition("|")
            self._set(target, source[first + np.where(found, wanted, lane)], active)
            if predicate:
                self._set(predicate, found, active)
        elif operation in ("redux", "vote"):
            source = self._get(names[1]).reshape(-1, LANES)
            if operation == "vote":
                source = source.astype(bool) << np.arange(LANES)
            self._set(names[0], source.sum(axis=1).repeat(LANES), active)
        elif operation == "setp":
            compare = {"lt": np.less, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal}[modifiers[0]]
            self._set(names[0], compare(self._get(names[1]), self._get(names[2])), active)
        else:
            self._set(names[0], _results(operation, [self._get(name) for name in names[1:]]), active)

    def _address(self, text: str) -> np.ndarray:
        register, _, offset = text.strip("[]").partition("+")
        return self._get(register) + int(offset or 0)

    def _get(self, name: str) -> np.ndarray:
        if name in self.registers:
            return self.registers[name]
        return np.full(self.threads, int(name), np.int64)

    def _set(self, name: str, value: np.ndarray, active: np.ndarray) -> None:
        before = self.registers.get(name, np.zeros(self.threads, np.int64))
        self.registers[name] = np.where(active, value, before)


def _results(operation: str, given: list[np.ndarray]) -> np.ndarray:
    if operation == "mov":
        return given[0]
    if operation == "selp":
        return np.where(given[2].astype(bool), given[0], given[1])
    if operation == "mad":
        return given[0] * given[1] + given[2]
    if operation == "brev":
        return np.array([int(f"{int(x) & _MASK:032b}"[::-1], 2) for x in given[0]])
    if operation == "clz":
        return np.array([32 - (int(x) & _MASK).bit_length() for x in given[0]])
    if operation == "popc":
        return np.array([(int(x) & _MASK).bit_count() for x in given[0]])
    if operation == "bmsk":
        return (1 << (given[1] & 31)) - 1
    return {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "min": np.minimum,
        "and": np.bitwise_and,
        "shl": np.left_shift,
        "shr": np.right_shift,
    }[operation](*given)
