"""Finds the steps of e4m3 kernels in machine code, and checks the operands of their products."""

from __future__ import annotations

import re

from support.loops import loops


def steps_of(sass: str, products: int) -> list[list[str]]:
    """The instructions of a step of each consumer: the loops with ``products`` products."""
    bodies = [body for body in loops(sass) if sum("QGMMA" in one for one in body) == products]
    steps = sorted(bodies, key=len)[:2]
    assert len(steps) == 2
    return steps


def check_operands_are_of_this_step(sass: str, products: int) -> None:
    """Check that operands are written in the step that reads them, and after the wait for the previous products: ptxas
    12.8 has reused registers of operands of e4m3 products for other values."""
    for step in steps_of(sass, products):
        operands = [(at, found[1]) for at, one in enumerate(step) if (found := re.match(r"QGMMA\S+ R\d+, R(\d+)", one))]
        assert len(operands) == 16
        for at, first in operands:
            for register in range(int(first), int(first) + 4):
                before, after = _writers(step, at, register)
                assert before in ("PRMT", "IMAD.MOV.U32", "MOV")
                assert not after


def _writers(code: list[str], at: int, register: int) -> tuple[str, list[str]]:
    """The last instruction before ``code[at]`` that writes a register, and the instructions that write it between
    ``code[at]`` and the next wait for products."""
    write = re.compile(rf"(?:@!?U?P\d+ )?(?!ST|BAR|RED|QGMMA)([A-Z][\w.]*) R{register}\b")
    before = next(found[1] for one in reversed(code[:at]) if (found := write.match(one)))
    end = next(i for i in range(at, len(code)) if "DEPBAR" in code[i])
    return before, [one for one in code[at:end] if write.match(one)]
