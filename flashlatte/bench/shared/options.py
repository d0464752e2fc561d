"""The settings of a run, the same in the command and in each of its processes."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import Any

from flashlatte.bench import cases
from flashlatte.bench.problems import Problem
from flashlatte.bench.shared.calls import WAYS
from flashlatte.bench.shared.random_problems import DRAWS

# Random problems of each operation that are called before the measurement, to compile their kernels.
COMPILED_DRAWS = 3


@dataclass(frozen=True)
class SharedGpuOptions:
    """Options of a run of several processes on one GPU.

    Attributes:
        processes, seconds: number of processes that call kernels, and their run time.
        each: seconds of one case.
        random: draw random problems instead of using the bench cases.
        seed: seed of the random problems; each process draws different ones.
        operations, cases: only these, by name; all if None.
        problem_reprs: the ``repr`` of problems to use instead of the bench cases.
        backend: the backend to call; None: the best one that supports a case.
        streams: number of streams for concurrent calls.
        ways: names in ``WAYS``, used alternately.
        load: number of further processes, which multiply matrices.
    """

    processes: int = 6
    seconds: float = 30.0
    each: float = 4.0
    random: bool = False
    seed: int = 0
    operations: tuple[str, ...] | None = None
    cases: tuple[str, ...] | None = None
    problem_reprs: tuple[str, ...] | None = None
    backend: str | None = None
    streams: int = 2
    ways: tuple[str, ...] = WAYS
    load: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SharedGpuOptions:
        """The options among values of argparse or JSON, whose lists become tuples."""
        named: dict[str, Any] = {field.name: values[field.name] for field in fields(cls)}
        lists: dict[str, Any] = {name: tuple(value) for name, value in named.items() if isinstance(value, list)}
        return cls(**named | lists)

    def labels(self) -> list[str]:
        """The operations of random problems, or the names of the cases.

        Raises:
            ValueError: an unknown name, or no case is selected.
        """
        known = list(DRAWS) if self.random else list(self._listed())
        if self.random:
            wanted = self.operations
        else:
            wanted = self.cases
            if self.operations is not None:
                known = [name for name, problem in self._listed().items() if problem.operation in self.operations]
        for name in wanted or ():
            if name not in known:
                raise ValueError(f"no operation or case named {name!r}; there are {', '.join(known)}")
        chosen = [name for name in known if wanted is None or name in wanted]
        if not chosen:
            raise ValueError(f"operations={self.operations} and cases={self.cases} leave nothing")
        return chosen

    def problems(self, process: int) -> Iterator[Problem]:
        """The problems of a process, in an infinite loop; each process starts with a different one."""
        labels, listed, rng = self.labels(), self._listed(), Random(f"{self.seed}, {process}")
        first = process * len(labels) // self.processes
        for label in itertools.cycle([*labels[first:], *labels[:first]]):
            yield DRAWS[label](rng) if self.random else listed[label]

    def compiled_first(self, process: int) -> list[Problem]:
        """A process's share of the problems that are called once before the measurement."""
        if not self.random:
            return [self._listed()[label] for label in self.labels()[process :: self.processes]]
        rng = Random(self.seed)
        drawn = [DRAWS[label](rng) for _ in range(COMPILED_DRAWS) for label in self.labels()]
        return drawn[process :: self.processes]

    def _listed(self) -> dict[str, Problem]:
        if self.problem_reprs is not None:
            return {text: parse(text) for text in self.problem_reprs}
        return {case.problem.name: case.problem for case in cases.CASES}


def parse(text: str) -> Problem:
    """The problem whose repr is ``text``: "TopK(rows=1, width=32768)", with or without names.

    Raises:
        ValueError: no such kind of problem, or something other than literals and problems in it.
    """
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"problem must be like TopK(rows=1, width=32768), got {text!r}: {error}") from error
    if not isinstance(found, Problem):
        raise ValueError(f"problem must be like TopK(rows=1, width=32768), got {text!r}")
    return found


def _value(node: ast.expr) -> object:
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    kind = node.func.id if isinstance(node.func, ast.Name) else ""
    if kind not in Problem.kinds:
        raise ValueError(f"no kind of problem is named {kind!r}")
    named = {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg}
    return Problem.kinds[kind](*(_value(argument) for argument in node.args), **named)
