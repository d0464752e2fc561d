"""``support.stack_pointer`` finds uses of the stack pointer that ptxas made of an unassigned register, and no
others.
"""

import pytest
from support.stack_pointer import stack_pointer_as_number


@pytest.mark.parametrize(
    ("instruction", "found"),
    [
        ("F2FP.F16.E4M3.UNPACK_B R3, R1 ;", True),
        ("LOP3.LUT R4, R1.reuse, 0xffff, RZ, 0xc0, !PT ;", True),
        ("@P0 SHF.R.U32.HI R4, RZ, 0x8, R1 ;", True),
        ("LDC R1, c[0x0][0x28] ;", False),
        ("VIADD R1, R1, 0xfffffff8 ;", False),
        ("STL.64 [R1], R6 ;", False),
        ("@!P0 LDL.LU R72, [R1+0x4] ;", False),
        ("IMAD.MOV.U32 R20, RZ, RZ, R1 ;", False),
        ("F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R13, R1, R10, RZ ;", False),
        ("F2FP.F16.E4M3.UNPACK_B R3, R11 ;", False),
    ],
)
def test_stack_pointer(instruction, found):
    sass = f"        /*0000*/                   {instruction}\n"
    assert bool(stack_pointer_as_number(sass)) is found
