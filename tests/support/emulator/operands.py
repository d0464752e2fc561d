"""Operands of an instruction as functions of a warp."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from support.emulator.arithmetic import LITERAL
from support.emulator.elements import LANE, LANES, STORED, Array, literal
from support.emulator.machine import PARAMETERS, Machine, Warp
from support.emulator.program import Instruction

if TYPE_CHECKING:
    from typing import TypeAlias

    Reader: TypeAlias = Callable[[Warp], Array]
    Writer: TypeAlias = Callable[[Warp, Array, "Array | None"], None]

_SHARED_SYMBOL = re.compile(r"(\w*smem\w*)(?:\+(\d+))?")


def reader(machine: Machine, ins: Instruction, operand: str, dtype: Any) -> Reader:
    """The operand's value: an array of lanes, or a scalar, of ``dtype``."""
    slot = ins.slot(operand)
    if slot is None:
        variable = ins.scope.variable(operand)
        if variable is not None:
            return lambda _: dtype(machine.variables + variable)
        return _constant(machine, operand, dtype)
    if dtype == LITERAL:
        return lambda warp: int(warp.registers[slot][0])
    stored = np.dtype(STORED[machine.program.bits[slot]])
    if stored == dtype:
        return lambda warp: warp.registers[slot]
    if stored.itemsize == np.dtype(dtype).itemsize:
        return lambda warp: warp.registers[slot].view(dtype)
    return lambda warp: warp.registers[slot].astype(dtype)


def _constant(machine: Machine, operand: str, dtype: Any) -> Reader:
    if dtype == LITERAL:
        number = int(operand, 0)
        return lambda _: number
    if operand.startswith("%"):
        return _special(machine, operand, dtype)
    names = [name for name, _ in machine.program.parameters]
    if symbol := _SHARED_SYMBOL.fullmatch(operand):
        value = dtype(int(symbol[2] or 0))
    elif operand in names:
        value = np.uint64(PARAMETERS + 256 * names.index(operand))
    else:
        value = literal(operand, dtype)
    return lambda _: value


def _special(machine: Machine, name: str, dtype: Any) -> Reader:
    registers: dict[str, Reader] = {
        "%tid.x": lambda warp: warp.thread,
        "%tid.y": lambda _: 0,
        "%tid.z": lambda _: 0,
        "%laneid": lambda _: LANE,
        "%warpid": lambda warp: warp.index,
        "%ntid.x": lambda _: machine.program.threads,
        "%ctaid.x": lambda warp: warp.cta.number % machine.grid[0],
        "%ctaid.y": lambda warp: warp.cta.number // machine.grid[0] % machine.grid[1],
        "%ctaid.z": lambda warp: warp.cta.number // (machine.grid[0] * machine.grid[1]),
        **{f"%nctaid.{axis}": lambda _, i=i: machine.grid[i] for i, axis in enumerate("xyz")},
        "%cluster_ctarank": lambda warp: warp.cta.rank,
        "%cluster_ctaid.x": lambda warp: warp.cta.rank,
        "%cluster_nctarank": lambda warp: len(warp.cta.cluster),
        "%clusterid.x": lambda warp: warp.cta.number // len(warp.cta.cluster),
        "%dynamic_smem_size": lambda _: machine.shared_bytes,
        "%smid": lambda warp: warp.cta.number % 132,
        **dict.fromkeys(("%clock", "%clock64", "%globaltimer"), lambda _: machine.clock),
    }
    if name not in registers:
        raise NotImplementedError(name)
    read = registers[name]
    return lambda warp: np.asarray(read(warp)).astype(dtype)


def scalar(value: Array) -> int:
    """An operand that all lanes have in common."""
    return int(np.asarray(value).flat[0])


def address(machine: Machine, ins: Instruction, operand: str) -> Reader:
    """The addresses "[register + offset]" of the lanes, in int64."""
    base, _, offset = operand.strip().removeprefix("[").removesuffix("]").partition("+")
    base, distance = base.strip(), int(offset.strip() or "0", 0)
    slot = ins.slot(base)
    if slot is not None:
        return lambda warp: warp.registers[slot].astype(np.int64) + distance
    names = [name for name, _ in machine.program.parameters]
    variable = ins.scope.variable(base)
    if variable is not None:
        begin = machine.variables + variable
    elif _SHARED_SYMBOL.fullmatch(base):
        begin = 0
    else:
        begin = PARAMETERS + 256 * names.index(base) if base in names else int(base, 0)
    fixed = np.full(LANES, begin + distance, np.int64)
    return lambda _: fixed


def writer(machine: Machine, ins: Instruction, operand: str) -> Writer:
    """Sets a register, in the lanes of a mask or in all."""
    if operand == "_":
        return lambda warp, value, mask: None
    slot = ins.slot(operand)
    if slot is None:
        raise NotImplementedError(f"{operand} in {ins.text}")
    stored = np.dtype(STORED[machine.program.bits[slot]])

    def write(warp: Warp, value: Array, mask: Array | None) -> None:
        value = np.asarray(value)
        if value.dtype != stored:
            value = value.view(stored) if value.dtype.itemsize == stored.itemsize else value.astype(stored)
        if value.ndim == 0:
            value = np.full(LANES, value, stored)
        warp.registers[slot] = value if mask is None else np.where(mask, value, warp.registers[slot])

    return write
