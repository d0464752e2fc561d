"""Every kernel has a case of ``flashlatte bench`` and random problems for ``flashlatte bench shared-gpu``."""

from __future__ import annotations

from random import Random

import pytest

from flashlatte import ops
from flashlatte.bench import cases
from flashlatte.bench.shared.random_problems import DRAWS
from flashlatte.runtime import dispatch

KERNELS = {"hopper", "portable"}
# Calls that consist of several operations.
COMPOSED = {"index_select", "paged_index_select"}


def operations_with_kernels() -> set[str]:
    ops.load()
    known = {name: dispatch._REGISTRY[name] for name in dispatch.operations()}
    return {name for name, implementations in known.items() if KERNELS & set(implementations)}


@pytest.mark.parametrize("found", [{case.operation for case in cases.CASES}, set(DRAWS)], ids=["listed", "random"])
def test_every_operation_with_a_kernel_has_problems(found: set[str]) -> None:
    assert found == operations_with_kernels() | COMPOSED


def test_problems_have_distinct_names() -> None:
    problems = {case.problem for case in cases.CASES}
    assert len({problem.name for problem in problems}) == len(problems)


@pytest.mark.parametrize("operation", DRAWS)
def test_random_problems_are_of_their_operation(operation: str) -> None:
    assert {DRAWS[operation](Random(seed)).operation for seed in range(20)} == {operation}
