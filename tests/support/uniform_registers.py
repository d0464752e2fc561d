"""Finds uniform registers that machine code reads before writing them.

CUDA 12.8's ptxas, which ships with Triton 3.6 and 3.7, sometimes drops the first instruction of a WGMMA descriptor: the
kernel compiles, and multiplies arbitrary shared memory.
"""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?);")
_OPERANDS = re.compile(r",(?![^\[]*\])")
_REGISTER = re.compile(r"\bUR(\d+)\b")
# CUDA 13's ptxas saves uniform registers in vector registers, also those that are not written yet.
_SPILL = re.compile(r"MOV(\.SPILL)? (R\d+), UR(\d+)$")
_FILL = re.compile(r"R2UR(?:\.FILL)? UR(\d+), (R\d+)$")
_WRITE_UNIFORM = {"R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX", "CREDUX", "ELECT", "LDCU"}
# These only read what their operands name.
_READ_ONLY = re.compile(r"UTMA|UBLK|USETMAXREG|UCGABAR|UPREFETCH|USTGR|UREDGR")


def read_before_written(sass: str) -> list[str]:
    """The instructions that do so, in the order of the listing, except those of called functions."""
    kernel, *functions = re.split(r"^\s*\.weak\s", sass, flags=re.MULTILINE)
    results = set().union(*(_written(match) for match in _INSTRUCTION.finditer("".join(functions))))
    written: set[int] = set()
    empty: set[str] = set()
    found = []
    for instruction in _INSTRUCTION.finditer(kernel):
        text = f"{instruction[1]} {instruction[2].strip()}"
        spill = _SPILL.match(text)
        # A plain move is such a copy too, if the register's next use is to bring it back.
        if spill and (spill[1] or _next_use(kernel, instruction.end(), spill[2]).startswith("R2UR")):
            (empty.discard if int(spill[3]) in written else empty.add)(spill[2])
            continue
        if (fill := _FILL.match(text)) and fill[2] in empty:
            written.discard(int(fill[1]))
            continue
        empty.difference_update(_operands(instruction)[:1])
        target = _target(instruction)
        # A descriptor of a product names four registers, of which it may need two.
        sources = [operand for operand in _operands(instruction) if operand != target and "gdesc" not in operand]
        if target is not None and _operands(instruction).count(target) > 1:
            sources.append(target)
        unwritten = any(number not in written for operand in sources for number in _numbers(instruction, operand))
        if unwritten and instruction[1] == "UMOV":
            # A copy is not a read: ptxas copies addresses whose upper half it computes later.
            written -= _written(instruction)
            continue
        if unwritten:
            found.append(instruction[0])
        written |= results if instruction[1].startswith("CALL") else _written(instruction)
    return found


def _next_use(kernel: str, start: int, register: str) -> str:
    """The next instruction that names a register; empty if there is none."""
    name = re.compile(rf"\b{register}\b")
    found = (match for match in _INSTRUCTION.finditer(kernel, start) if name.search(match[2]))
    return next((match[1] for match in found), "")


def _numbers(instruction: re.Match[str], operand: str) -> list[int]:
    """The registers that an operand names; addresses of copies by TMA are two."""
    numbers = [int(number) for number in _REGISTER.findall(operand)]
    if instruction[1].startswith("UTMA") and operand.startswith("["):
        numbers += [number + 1 for number in numbers]
    return numbers


def _operands(instruction: re.Match[str]) -> list[str]:
    return [operand.strip() for operand in _OPERANDS.split(instruction[2])]


def _target(instruction: re.Match[str]) -> str | None:
    name = instruction[1].split(".")[0]
    if name not in _WRITE_UNIFORM and (not name.startswith("U") or _READ_ONLY.match(name)):
        return None
    # Written predicates precede it.
    return next((one for one in _operands(instruction) if not re.fullmatch(r"!?U?P(?:T|\d+)", one)), None)


def _written(instruction: re.Match[str]) -> set[int]:
    register = _REGISTER.fullmatch(_target(instruction) or "")
    if register is None:
        return set()
    opcode = instruction[1]
    count = 4 if ".128" in opcode else 2 if "64" in opcode or "WIDE" in opcode else 1
    return set(range(int(register[1]), int(register[1]) + count))
