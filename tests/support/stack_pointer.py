"""Finds uses of the stack pointer as a value in machine code.

CUDA 12.8's ptxas, which ships with Triton 3.6 and 3.7, moved a conversion from e4m3 before the conversion to e4m3 whose
result it reads. The register was then unassigned, and ptxas used R1, the stack pointer, instead.
"""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?);")
# These instructions compute stack addresses, or allocate the stack. Triton converts a single value to e4m3 as one of a
# pair; the other value may be any register.
_HARMLESS = re.compile(r"(?:IMAD\.)?MOV|VIADD|IADD|LEA|R2UR|IMAD\.IADD|IMAD\.X|F2FP\.SATFINITE\.E4M3\.F32\.PACK_AB")


def stack_pointer_as_number(sass: str) -> list[str]:
    """The instructions that read R1, except as an address or as a value that is not used."""
    found = []
    for instruction in _INSTRUCTION.finditer(sass):
        _, *sources = re.split(r",(?![^\[]*\])", instruction[2])
        reads = any(re.search(r"\bR1\b", source) and "[" not in source for source in sources)
        if reads and not _HARMLESS.match(instruction[1]):
            found.append(instruction[0])
    return found
