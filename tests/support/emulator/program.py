"""PTX of one kernel, parsed into a list of instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_BITS = {"pred": 1, **{f"{kind}{bits}": bits for kind in "bsuf" for bits in (8, 16, 32, 64)}}
_VARIABLE = re.compile(r"\.shared (?:\.align \d+ )?\.(\w+) (\w+)\[(\d+)\]")
_LABEL = re.compile(r"([\w$]+)\s*:(?!:)")


class Scope:
    """Registers, labels and variables of a block in braces. Inline assembly declares its own."""

    def __init__(self, parent: Scope | None) -> None:
        self.parent = parent
        self.registers: dict[str, int] = {}
        self.labels: dict[str, int] = {}
        self.variables: dict[str, int] = {}

    def variable(self, name: str) -> int | None:
        """The offset of a static variable in shared memory, among those of the kernel, or None."""
        if name in self.variables:
            return self.variables[name]
        return self.parent.variable(name) if self.parent else None

    def register(self, name: str) -> int | None:
        """The slot of a register, or None for any other operand."""
        if name in self.registers:
            return self.registers[name]
        return self.parent.register(name) if self.parent else None

    def label(self, name: str) -> int:
        if name in self.labels:
            return self.labels[name]
        if self.parent is None:
            raise KeyError(name)
        return self.parent.label(name)


@dataclass
class Instruction:
    """``name.modifiers operands``.

    Attributes:
        guard: the slot of the predicate that selects the lanes that execute it, and whether it is negated.
    """

    name: str
    modifiers: list[str]
    operands: list[str]
    guard: tuple[int, bool] | None
    scope: Scope = field(repr=False)
    text: str

    def __post_init__(self) -> None:
        self.suffix = ".".join(self.modifiers)

    def slot(self, operand: str) -> int | None:
        return self.scope.register(operand)


@dataclass
class Program:
    """A kernel.

    Attributes:
        bits: width in bits of each register slot; 1 for a predicate.
        parameters: name and size in bytes of each parameter.
        threads: threads of a CTA.
        tables: labels of each table of branch targets.
    """

    instructions: list[Instruction]
    bits: list[int]
    parameters: list[tuple[str, int]]
    threads: int
    tables: dict[str, list[str]]


def split_operands(text: str) -> list[str]:
    """Operands between commas; braces and brackets stay whole."""
    parts, depth, begin = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and not depth:
            parts.append(text[begin:i].strip())
            begin = i + 1
    last = text[begin:].strip()
    return [*parts, last] if last else parts


def vector(operand: str) -> list[str]:
    """The registers of a vector operand "{a, b}"; of a single register, that one."""
    return split_operands(operand.strip().removeprefix("{").removesuffix("}"))


def parse(ptx: str) -> Program:
    entry = ptx.index(".entry")
    begin = ptx.index("{", ptx.index(")", entry))
    head = ptx[entry:begin]
    parameters = []
    for declared in re.finditer(r"\.param\s+([^,\n]*?)(\w+)(?:\[(\d+)\])?\s*[,\n)]", head):
        kind = next(word for word in re.findall(r"\.(\w+)", declared[1]) if word in _BITS)
        parameters.append((declared[2], _BITS[kind] // 8 * int(declared[3] or 1)))
    threads = re.search(r"\.(?:req|max)ntid\s+(\d+)", head)
    assert threads is not None
    reader = _Reader()
    for statement in _statements(ptx[begin + 1 :]):
        if reader.add(statement):
            break
    return Program(reader.instructions(), reader.bits, parameters, int(threads[1]), reader.tables)


def _statements(body: str) -> Iterator[str]:
    """Statements without semicolons, labels with their colon, and the braces of scopes."""
    body = re.sub(r"//[^\n]*", "", body)
    body = re.sub(r"^[ \t]*\.(?:loc|file|section)\b[^\n]*", "", body, flags=re.MULTILINE)
    at = 0
    while at < len(body):
        if body[at].isspace() or body[at] == ";":
            at += 1
        elif body[at] in "{}":
            yield body[at]
            at += 1
        elif label := _LABEL.match(body, at):
            yield f"{label[1]}:"
            at = label.end()
        else:
            end = body.index(";", at)
            yield " ".join(body[at:end].split())
            at = end + 1


class _Reader:
    def __init__(self) -> None:
        self.bits: list[int] = []
        self.tables: dict[str, list[str]] = {}
        self._scope = Scope(None)
        self._texts: list[tuple[str, Scope]] = []
        self._label = ""
        self._variable_bytes = 0

    def add(self, statement: str) -> bool:
        """Returns whether the kernel has ended."""
        if statement == "{":
            self._scope = Scope(self._scope)
        elif statement == "}":
            if self._scope.parent is None:
                return True
            self._scope = self._scope.parent
        elif statement.endswith(":"):
            self._label = statement[:-1]
            self._scope.labels[self._label] = len(self._texts)
        elif statement.startswith(".branchtargets"):
            self.tables[self._label] = split_operands(statement.removeprefix(".branchtargets"))
        elif statement.startswith(".reg"):
            _, kind, names = statement.split(None, 2)
            for name in split_operands(names):
                many = re.fullmatch(r"(.*)<(\d+)>", name)
                for one in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
                    self._scope.registers[one] = len(self.bits)
                    self.bits.append(_BITS[kind[1:]])
        elif variable := _VARIABLE.fullmatch(statement):
            self._scope.variables[variable[2]] = self._variable_bytes
            self._variable_bytes += -(-_BITS[variable[1]] // 8 * int(variable[3]) // 128) * 128
        elif not statement.startswith("."):
            self._texts.append((statement, self._scope))
        return False

    def instructions(self) -> list[Instruction]:
        return [self._instruction(text, scope) for text, scope in self._texts]

    def _instruction(self, text: str, scope: Scope) -> Instruction:
        guard, line = None, text
        if guarded := re.match(r"@(!?)([%\w$]+)\s+", text):
            slot = scope.register(guarded[2])
            assert slot is not None, text
            guard = (slot, guarded[1] == "!")
            line = text[guarded.end() :]
        opcode, _, operands = line.partition(" ")
        # "shared::cta" is one modifier.
        name, *modifiers = re.split(r"\.", opcode)
        return Instruction(name, modifiers, split_operands(operands), guard, scope, text)
