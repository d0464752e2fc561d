"""A compiled kernel without branches, executed from its PTX for all threads of one CTA.

Each instruction runs for all threads before the next one, so that a missing barrier is not noticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch
from support.compile import SHARED_BYTES

Words = np.ndarray  # uint64, one per thread
_CTA_REGISTERS = ("%ctaid.x", "%ctaid.y", "%ctaid.z", "global_smem")


class PtxKernel:
    """``memory``: uint8, the global memory, which begins at address 0."""

    def __init__(self, ptx: str, threads: int, memory: np.ndarray) -> None:
        self.threads, self.memory = threads, memory
        self._shared = np.zeros(SHARED_BYTES[90], np.uint8)
        self._instructions = _instructions(ptx)
        self._registers: dict[str, Words] = {}

    def run(self, parameters: Sequence[int]) -> None:
        """``parameters``: the kernel's, in the order of its PTX; pointers as addresses."""
        thread = np.arange(self.threads, dtype=np.uint64)
        self._registers = {"%tid.x": thread} | {name: np.zeros_like(thread) for name in _CTA_REGISTERS}
        for guard, instruction in self._instructions:
            active = np.full(self.threads, True)
            if guard:
                active = self._value(guard.lstrip("@!")).astype(bool) ^ guard.startswith("@!")
            name, _, rest = instruction.partition(" ")
            operands = [one.strip() for one in re.split(r",(?![^{]*})", rest)]
            if name.startswith("ld.param"):
                number = int(re.findall(r"param_(\d+)", operands[1])[0])
                self._set(operands[0], self._value(str(parameters[number])), active)
            elif name.startswith(("ld.", "st.")):
                self._access(name, operands, active)
            elif name == "trap":
                assert not active.any(), "a thread traps"
            elif "{" in rest:
                self._move(name, operands, active)
            elif not name.startswith(("bar.", "ret")):
                self._set(operands[0].partition("|")[0], self._result(name, operands[1:]), active)

    def _value(self, operand: str) -> Words:
        if operand in self._registers:
            return self._registers[operand]
        number = int(operand.removeprefix("0f"), 16) if operand.startswith("0f") else int(operand, 0)
        return np.full(self.threads, number & (1 << 64) - 1, np.uint64)

    def _set(self, register: str, value: Words, active: np.ndarray) -> None:
        before = self._registers.get(register, np.zeros(self.threads, np.uint64))
        self._registers[register] = np.where(active, value.astype(np.uint64), before)

    def _access(self, name: str, operands: list[str], active: np.ndarray) -> None:
        """A load or store of one register or of several."""
        is_load, memory = name.startswith("ld."), self._shared if ".shared" in name else self.memory
        pointer, registers = operands[is_load].strip("[] "), operands[not is_load].strip("{} ").split(",")
        base, _, offset = pointer.partition("+")
        address = (self._value(base.strip()) + self._value(offset.strip() or "0")).astype(np.int64)[active]
        size = _bits(name) // 8
        assert not (address % (size * len(registers))).any(), f"{name} of a misaligned address"
        assert ((address >= 0) & (address + size * len(registers) <= len(memory))).all(), f"{name} out of bounds"
        for i, register in enumerate(registers):
            places = address[:, None] + i * size + np.arange(size)
            if is_load:
                loaded = np.zeros(self.threads, np.uint64)
                padded = np.pad(memory[places], ((0, 0), (0, 8 - size)))
                loaded[active] = padded.view(np.uint64)[:, 0]
                self._set(register.strip(), loaded, active)
            else:
                memory[places] = self._value(register.strip())[active, None].view(np.uint8)[:, :size]

    def _move(self, name: str, operands: list[str], active: np.ndarray) -> None:
        """mov.b32 {low, high}, word; or the reverse."""
        unpacks = operands[0].startswith("{")
        parts = [part.strip() for part in operands[not unpacks].strip("{} ").split(",")]
        bits = np.uint64(_bits(name) // len(parts))
        if unpacks:
            for i, part in enumerate(parts):
                self._set(part, self._value(operands[1]) >> bits * np.uint64(i) & _mask(int(bits)), active)
        else:
            packed = [(self._value(part) & _mask(int(bits))) << bits * np.uint64(i) for i, part in enumerate(parts)]
            self._set(operands[0], np.bitwise_or.reduce(packed), active)

    def _result(self, name: str, operands: list[str]) -> Words:
        if name.startswith("shfl.sync.bfly"):
            return self._value(operands[0])[np.arange(self.threads) ^ int(operands[1])]
        values = [self._value(operand) for operand in operands]
        return _result(name, values)


def _instructions(ptx: str) -> list[tuple[str, str]]:
    """Guard ("@%p1", "@!p" or nothing) and text of each instruction."""
    body = ptx[ptx.index(".visible .entry") :]
    body = re.sub(r"//.*|\.loc\b.*|\.pragma\b.*", "", body[body.index("{", body.index(")")) + 1 :])
    body = re.sub(r"^\s*\$\w+:|^\s*[{}]|[{}]\s*$", " ", body[: body.index("ret;") + 4], flags=re.MULTILINE)
    found = []
    for text in body.split(";"):
        match = re.match(r"(@!?%?\w+)?\s*(.*)", " ".join(text.strip().lstrip("{} ").split()))
        if match and match[2] and not match[2].startswith(("}", ".")):
            found.append((match[1] or "", match[2]))
    return found


def _bits(name: str) -> int:
    return int(re.findall(r"\.[a-z](\d+)", name)[-1])


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _signed(value: Words, bits: int) -> np.ndarray:
    unused = 64 - bits
    return (value << np.uint64(unused)).view(np.int64) >> unused


def _unsigned(value: np.ndarray) -> Words:
    return value.astype(np.int64).view(np.uint64)


def _result(name: str, values: list[Words]) -> Words:
    operation, *modifiers = name.split(".")
    if operation == "cvt":
        return _CONVERSIONS[".".join(modifiers)](*values)
    if modifiers[-1] == "bf16x2":
        return _bf16_products(*values)
    if operation == "prmt":
        return _prmt(*values)
    if operation == "lop3":
        return _lop3(*values)
    if modifiers[-1] == "pred":
        return {"and": np.logical_and, "or": np.logical_or, "not": np.logical_not}[operation](*values)
    bits, is_signed = _bits(name), modifiers[-1].startswith("s")
    if operation == "setp":
        if modifiers[-1] == "f32":
            pair = [_floats(value, torch.float32).numpy() for value in values[:2]]
        else:
            pair = [_signed(value, bits) if is_signed else value & _mask(bits) for value in values[:2]]
        compared = _COMPARISONS[modifiers[0]](*pair)
        return compared & values[2].astype(bool) if "and" in modifiers else compared
    if operation in ("mul", "mad"):
        product = _unsigned(_signed(values[0], bits) * _signed(values[1], bits)) if is_signed else values[0] * values[1]
        if modifiers[0] == "hi":
            return product >> np.uint64(bits)
        total = product + (values[2] if operation == "mad" else np.uint64(0))
        return total & _mask(2 * bits if modifiers[0] == "wide" else bits)
    if operation == "shr" and is_signed:
        return _unsigned(_signed(values[0], bits) >> values[1].astype(np.int64)) & _mask(bits)
    if operation == "bfe":
        position, length = (int(value[0]) for value in values[1:])
        field = values[0] >> np.uint64(position) & _mask(length)
        return _unsigned(_signed(field, length)) & _mask(bits) if is_signed else field
    if operation == "selp":
        return np.where(values[2].astype(bool), values[0], values[1])
    functions: dict[str, Callable[..., Words]] = {
        "add": np.add,
        "sub": np.subtract,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "not": np.bitwise_not,
        "shl": np.left_shift,
        "shr": np.right_shift,
        "mov": np.copy,
    }
    return functions[operation](*values) & _mask(bits)


_COMPARISONS: dict[str, Callable[..., np.ndarray]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


def _floats(value: Words, dtype: torch.dtype) -> torch.Tensor:
    """The low bits of each value as a float of this type."""
    whole = np.ascontiguousarray(value.view(np.uint8).reshape(-1, 8)[:, : dtype.itemsize])
    return torch.from_numpy(whole).view(dtype).squeeze(1).float()


def _words(values: torch.Tensor) -> Words:
    """The bits of 16-bit or 32-bit floats."""
    bits = values.view(torch.int16 if values.element_size() == 2 else torch.int32)
    return bits.numpy().astype(np.int64).view(np.uint64) & _mask(8 * values.element_size())


def _bf16_products(a: Words, b: Words) -> Words:
    halves = [
        _words((_floats(a >> shift, torch.bfloat16) * _floats(b >> shift, torch.bfloat16)).bfloat16())
        for shift in (np.uint64(0), np.uint64(16))
    ]
    return halves[0] | halves[1] << np.uint64(16)


def _pair_of_bf16(high: Words, low: Words) -> Words:
    low, high = (_words(_floats(value, torch.float32).bfloat16()) for value in (low, high))
    return low | high << np.uint64(16)


def _pair_of_fp16(codes: Words) -> Words:
    low, high = (_words(_floats(codes >> np.uint64(shift), torch.float8_e4m3fn).half()) for shift in (0, 8))
    return low | high << np.uint64(16)


_CONVERSIONS: dict[str, Callable[..., Words]] = {
    "s64.s32": lambda value: _unsigned(_signed(value, 32)),
    "u64.u32": lambda value: value & _mask(32),
    "u32.u64": lambda value: value & _mask(32),
    "rn.f16x2.e4m3x2": _pair_of_fp16,
    "f32.f16": lambda value: _words(_floats(value, torch.float16)),
    "rn.bf16x2.f32": _pair_of_bf16,
}


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    both, result = a | b << np.uint64(32), np.zeros_like(a)
    for shift in (np.uint64(4 * i) for i in range(4)):
        place = selector >> shift & np.uint64(15)
        byte = both >> (place & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = (byte >> np.uint64(7)) * np.uint64(255)
        result |= np.where(place > 7, sign, byte) << shift * np.uint64(2)
    return result


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    result = np.zeros_like(a)
    for entry in range(8):
        if int(table[0]) >> entry & 1:
            chosen = [x if entry & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1))]
            result |= np.bitwise_and.reduce(chosen)
    return result & _mask(32)
