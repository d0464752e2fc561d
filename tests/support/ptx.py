"""Executes a few PTX instructions on tensors of 32-bit words."""

from __future__ import annotations

import re

import torch


def run(ptx: str, registers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All registers after executing ``ptx``, 32-bit words in int64."""
    registers = dict(registers)
    some = next(iter(registers.values()))

    def value(operand: str) -> torch.Tensor:
        if operand in registers:
            return registers[operand]
        return torch.full_like(some, int(operand, 0))

    for statement in ptx.strip().removeprefix("{").removesuffix("}").strip("; \n").split(";"):
        instruction, *operands = re.split(r"[\s,]+", statement.strip())
        if instruction == ".reg":
            continue
        name = instruction.split(".")[0]
        if name == "mov" and "{" in statement:
            _move_halves(statement, registers)
            continue
        target, *sources = operands[0], *map(value, operands[1:])
        if name == "mov":
            result = sources[0]
        elif name == "shr":
            result = sources[0] >> sources[1]
        elif name == "shl":
            result = (sources[0] << sources[1]) & 0xFFFFFFFF
        elif name == "and":
            result = sources[0] & sources[1]
        elif name == "not":
            result = sources[0] ^ 0xFFFFFFFF
        elif name == "add":
            result = (sources[0] + sources[1]) & 0xFFFFFFFF
        elif instruction == "sub.f16x2":
            halves = [numbers(sources[0], i, torch.float16) - numbers(sources[1], i, torch.float16) for i in range(2)]
            result = bits(halves[0]) | bits(halves[1]) << 16
        elif name == "xor":
            result = sources[0] ^ sources[1]
        elif name == "sub":
            result = (sources[0] - sources[1]) & 0xFFFFFFFF
        elif name == "lop3":
            result = lop3(sources[0], sources[1], sources[2], int(operands[-1], 0))
        elif name == "prmt":
            result = prmt(*sources)
        elif instruction == "cvt.rn.f16x2.e4m3x2":
            pair = torch.stack((sources[0] & 0xFF, sources[0] >> 8), dim=-1).to(torch.uint8)
            halves = pair.view(torch.float8_e4m3fn).half().view(torch.uint16).long()
            result = halves[..., 0] | halves[..., 1] << 16
        elif instruction == "cvt.f32.f16":
            result = numbers(sources[0], 0, torch.float16).float().view(torch.int32).long() & 0xFFFFFFFF
        elif instruction == "cvt.rn.bf16x2.f32":
            high, low = (bits(source.to(torch.int32).view(torch.float32).bfloat16()) for source in sources)
            result = low | high << 16
        elif instruction == "fma.rn.f16x2":
            # 64 bits hold a product and a sum of fp16.
            each = [[numbers(source, i, torch.float16).double() for source in sources] for i in range(2)]
            halves = [(a * b + c).half() for a, b, c in each]
            result = bits(halves[0]) | bits(halves[1]) << 16
        else:
            dtype = {"mul.rn.bf16x2": torch.bfloat16, "mul.rn.f16x2": torch.float16}[instruction]
            halves = [numbers(sources[0], i, dtype) * numbers(sources[1], i, dtype) for i in range(2)]
            result = bits(halves[0]) | bits(halves[1]) << 16
        registers[target] = result
    return registers


def lop3(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: int) -> torch.Tensor:
    """Bit by bit, the entry of ``table`` at a, b, c."""
    result = torch.zeros_like(a)
    for entry in range(8):
        if table >> entry & 1:
            chosen = [x if entry >> bit & 1 else x ^ 0xFFFFFFFF for x, bit in ((a, 2), (b, 1), (c, 0))]
            result |= chosen[0] & chosen[1] & chosen[2]
    return result


def prmt(a: torch.Tensor, b: torch.Tensor, selector: int | torch.Tensor) -> torch.Tensor:
    """Select four of eight bytes; if bit 3 of a selector is set, the byte's sign bit is replicated instead."""
    result = torch.zeros_like(a)
    for i in range(4):
        place = selector >> 4 * i & 15
        word = torch.where(torch.as_tensor(place & 4 != 0), b, a)
        byte = (word >> 8 * (place & 3)) & 255
        signs = torch.where(byte > 127, 255, 0)
        result |= torch.where(torch.as_tensor(place & 8 != 0), signs, byte) << 8 * i
    return result


def numbers(word: torch.Tensor, half: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return ((word >> 16 * half) & 0xFFFF).to(torch.uint16).view(dtype)


def bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.uint16).long()


def _move_halves(statement: str, registers: dict[str, torch.Tensor]) -> None:
    """mov.b32 {low, high}, word;"""
    low, high, word = re.findall(r"[$\w]+", statement.split(None, 1)[1])
    registers[low], registers[high] = registers[word] & 0xFFFF, registers[word] >> 16
