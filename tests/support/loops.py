"""Finds the loops in a kernel's machine code from its jumps.

A backward jump alone does not identify a loop: after an unsuccessful wait for a barrier, a warp jumps to code at the
end of the kernel, tries again and jumps back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_NEVER_FALLS_THROUGH = re.compile(r"(?:BRA(?:\.U)? `|BRX|EXIT|RET)")


def loops(sass: str) -> Iterator[list[str]]:
    """The instructions of each loop, including those of inner loops, in the order of the listing."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.search(line):
            code.append(instruction[1])
    targets = {at: labels[label] for at, one in enumerate(code) for label in _TARGET.findall(one)}
    heads = {0, *targets.values(), *(at + 1 for at, one in enumerate(code) if at in targets or _leaves(one))}
    starts = sorted(heads - {len(code)})
    ends = dict(zip(starts, [*starts[1:], len(code)], strict=True))
    before: dict[int, list[int]] = {start: [] for start in starts}
    for start, end in ends.items():
        if end - 1 in targets:
            before[targets[end - 1]].append(start)
        if end < len(code) and not _leaves(code[end - 1]):
            before[end].append(start)
    for start, end in ends.items():
        head = targets.get(end - 1, end)
        if head <= start and (blocks := _leading_to(start, head, before)):
            yield [one for block in sorted(blocks) for one in code[block : ends[block]]]


def _leaves(instruction: str) -> bool:
    return bool(_NEVER_FALLS_THROUGH.match(instruction))


def _leading_to(last: int, head: int, before: dict[int, list[int]]) -> set[int]:
    """The blocks between ``head`` and ``last``; empty if a path to ``last`` does not pass through ``head``."""
    found, open_ = {head, last}, [last] if last != head else []
    while open_:
        block = open_.pop()
        if not before[block]:
            return set()
        open_ += (new := [one for one in before[block] if one not in found])
        found.update(new)
    return found
