"""Uniform registers that machine code reads before it has written them.

CUDA 12.8's ptxas, which Triton 3.6 and 3.7 bring, drops the instruction that begins a wgmma descriptor now and then:
the kernel compiles, and multiplies what lies anywhere in shared memory.
"""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?);")
_OPERANDS = re.compile(r",(?![^\[]*\])")
_REGISTER = re.compile(r"\bUR(\d+)\b")
_WRITE_UNIFORM = {"R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX"}
# These only read what their operands name.
_READ_ONLY = re.compile(r"UTMA|UBLK|USETMAXREG|UCGABAR|UPREFETCH|USTGR|UREDGR")


def read_before_written(sass: str) -> list[str]:
    """The instructions that do, in the order of the listing."""
    written: set[int] = set()
    found = []
    for instruction in _INSTRUCTION.finditer(sass):
        opcode, operands = instruction[1], [operand.strip() for operand in _OPERANDS.split(instruction[2])]
        name = opcode.split(".")[0]
        target = None
        if name in _WRITE_UNIFORM or (name.startswith("U") and not _READ_ONLY.match(name)):
            # Predicates that are written stand before it.
            target = next((operand for operand in operands if not re.fullmatch(r"!?U?P(?:T|\d+)", operand)), None)
        # A descriptor of a product names four registers, of which it may need two.
        sources = [operand for operand in operands if operand is not target and "gdesc" not in operand]
        if any(int(number) not in written for operand in sources for number in _REGISTER.findall(operand)):
            found.append(instruction[0])
        if target is not None and (register := _REGISTER.fullmatch(target)):
            count = 4 if ".128" in opcode else 2 if ".64" in opcode or "WIDE" in opcode else 1
            written.update(range(int(register[1]), int(register[1]) + count))
    return found
