"""Detection of uniform registers that machine code reads before writing them."""

from __future__ import annotations

import pytest
from support.uniform_registers import read_before_written


def listing(*instructions: str) -> str:
    return "".join(f"        /*{16 * number:04x}*/    {text} ;\n" for number, text in enumerate(instructions))


@pytest.mark.parametrize(
    "instructions",
    [
        ("UMOV UR4, 0x40", "MOV R1, UR4", "IADD3 R2, R1, R3, RZ"),
        # An unwritten register is saved to another one, and written after it is restored.
        ("MOV.SPILL R1, UR5", "R2UR.FILL UR5, R1", "UMOV UR5, 0x40", "IMAD.U32 R2, RZ, RZ, UR5"),
        ("MOV R1, UR5", "R2UR UR5, R1", "UMOV UR5, 0x40", "IMAD.U32 R2, RZ, RZ, UR5"),
    ],
)
def test_registers_that_are_written_first(instructions: tuple[str, ...]) -> None:
    assert read_before_written(listing(*instructions)) == []


@pytest.mark.parametrize(
    ("instructions", "wrong"),
    [
        (("IMAD.U32 R2, RZ, RZ, UR5",), "UR5"),
        # The copy is used as a value.
        (("MOV R1, UR5", "IADD3 R2, R1, R3, RZ"), "MOV R1, UR5"),
        # The restored register is used as a value.
        (("MOV R1, UR5", "R2UR UR5, R1", "IMAD.U32 R2, RZ, RZ, UR5"), "IMAD.U32 R2"),
    ],
)
def test_registers_that_are_not(instructions: tuple[str, ...], wrong: str) -> None:
    (found,) = read_before_written(listing(*instructions))
    assert wrong in found
