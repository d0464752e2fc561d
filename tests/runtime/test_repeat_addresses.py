"""Repeated launches with tensors that share memory: arguments are identified by address."""

from __future__ import annotations

from typing import Any

import torch
from support.repeated_kernel import Add, launch, numbers, operation

from flashlatte.runtime import recording, repeat


def test_tensors_that_share_memory_are_not_confused(add: Add) -> None:
    call, ran = operation(add)
    a, b = numbers(add, 4), numbers(add, 4)
    for first, second in ((a, a), (b, b), (a, b), (b, a), (b, b)):
        (result,) = call(first, second)
        assert torch.equal(result, first + second)
    assert len(ran) == 2


def test_a_tensor_passed_twice_is_told_from_another_view_of_its_memory(add: Add) -> None:
    call, ran = operation(add)
    for _ in range(2):
        a = numbers(add, 4, 4)
        assert torch.equal(call(a, a)[0], a + a)
    assert len(ran) == 1
    for _ in range(2):
        a = numbers(add, 4, 4)
        call(a, a.t())
    assert len(ran) == 2
    a = numbers(add, 4, 4)
    call(a, a)
    assert len(ran) == 2


def test_only_the_same_sharing_of_memory_is_repeated(add: Add) -> None:
    call, ran = operation(add)
    a, b = numbers(add, 4), numbers(add, 4)
    call(a, b, out=a)
    for first, second, out in ((a, b, b), (a, a, a), (b, a, b)):
        expected = first + second
        (result,) = call(first, second, out=out)
        assert torch.equal(result, expected)
    # Anew where the output is the second operand, or both operands are one.
    assert len(ran) == 3


def test_more_sharing_than_was_recorded_is_left_to_the_operation(add: Add) -> None:
    """An operation may reject an output that is an input; other shared memory must not hide that."""
    call, ran = operation(add)
    a, b = numbers(add, 4), numbers(add, 4)
    call(a, a, out=b)
    assert len(ran) == 1
    call(a, a, out=a)
    assert len(ran) == 2


def test_a_view_from_within_an_argument_is_not_another_argument(add: Add) -> None:
    """The launch gets the second row of ``rows``, where ``b`` begins in some of the calls."""
    ran: list[int] = []
    work = recording.watched(lambda out, rows, b: launch(add, out, rows[1], b, 0.0))

    @repeat.repeats_launches
    def call(rows: torch.Tensor, b: torch.Tensor) -> Any:
        ran.append(1)
        out = torch.empty_strided(b.shape, b.stride())
        work(out, rows, b)
        return (out,)

    def calls_with(is_second_row: bool) -> None:
        rows = numbers(add, 2, 4)
        b = rows[1] if is_second_row else numbers(add, 4)
        add.known(rows[1])
        assert torch.equal(call(rows, b)[0], rows[1] + b)

    for _ in range(3):
        calls_with(is_second_row=True)
    assert len(ran) == 1
    for is_second_row in (False, True, False):
        calls_with(is_second_row)


def test_columns_of_one_tensor_are_arguments_like_others(add: Add) -> None:
    """Such as a latent and its rope: the range of the first contains the start of the second."""
    call, ran = operation(add)
    for is_one_tensor in (True, True, False):
        columns, others = numbers(add, 3, 8), numbers(add, 3, 8)
        a, b = columns[:, :4], (columns if is_one_tensor else others)[:, 4:]
        add.known(a, b)
        assert torch.equal(call(a, b)[0], a + b)
    assert len(ran) == 1


def test_an_argument_within_another_one_is_identified_by_its_offset(add: Add) -> None:
    """The launch gets views, which could belong to either argument."""
    call, ran = operation(add, lambda out, a, b, number: launch(add, out, a.view(-1), b.view(-1), number))
    for first, expected in ((1, 1), (1, 1), (2, 2), (2, 2), (1, 2)):
        rows = numbers(add, 9, 4)
        a, b = rows[:3].view(-1), rows[first : first + 3].view(-1)
        add.known(a, b)
        assert torch.equal(call(a, b)[0], a + b)
        assert len(ran) == expected
