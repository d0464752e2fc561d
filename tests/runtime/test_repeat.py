"""Repetition of a call's launches: which calls repeat, and what each repetition still does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from support.repeated_kernel import Add, launch, numbers, operation
from torch.overrides import TorchFunctionMode
from triton import knobs

from flashlatte.runtime import recording, repeat
from flashlatte.runtime.torch_op import register_op
from flashlatte.runtime.triton_internals import counting_launches


def test_repeats_with_other_tensors(add: Add) -> None:
    call, ran = operation(add)
    for _ in range(3):
        a, b = numbers(add, 4, 5), numbers(add, 4, 5)
        (result,) = call(a, b, number=2.0)
        assert torch.equal(result, a + b + 2.0)
    assert len(ran) == 1
    assert add.launches == 3


def test_writes_into_a_given_output(add: Add) -> None:
    call, ran = operation(add)
    for _ in range(2):
        a, b, out = (numbers(add, 4) for _ in range(3))
        (result,) = call(a, b, out=out)
        assert result is out
        assert torch.equal(out, a + b)
    assert len(ran) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"number": 1.0},
        {"a": torch.randn(5, 4).t()},
        {"a": torch.randn(21)[1:].view(4, 5)},
        {"a": torch.arange(20, dtype=torch.int32).view(4, 5)},
    ],
    ids=["number", "strides", "alignment", "dtype"],
)
def test_other_calls_run_anew(add: Add, change: dict[str, Any]) -> None:
    call, ran = operation(add)
    arguments = {"a": numbers(add, 4, 5), "b": numbers(add, 4, 5), "number": 0.0}
    call(**arguments)
    call(**arguments)
    assert len(ran) == 1
    changed = arguments | change
    (result,) = call(**changed)
    assert len(ran) == 2
    assert torch.equal(result, changed["a"] + changed["b"] + changed["number"])


def test_equal_values_of_another_type_are_checked(add: Add) -> None:
    call, _ = operation(add)
    a, b = numbers(add, 4), numbers(add, 4)
    call(a, b, number=1)
    with pytest.raises(TypeError):
        call(a, b, number=True)


def test_the_sign_of_zero_is_told_apart(add: Add) -> None:
    call, ran = operation(add)
    a, b = numbers(add, 4), numbers(add, 4)
    for number in (0.0, -0.0, 0.0, -0.0):
        call(a, b, number=number)
    assert len(ran) == 2


def test_nan_equals_nan(add: Add) -> None:
    call, ran = operation(add)
    a, b = numbers(add, 4), numbers(add, 4)
    for text in ("nan", "nan"):
        (result,) = call(a, b, number=float(text))
        assert result.isnan().all()
    assert len(ran) == 1


def test_a_parameter_is_a_tensor(add: Add) -> None:
    call, ran = operation(add)
    for _ in range(2):
        a, b = numbers(add, 4), torch.nn.Parameter(numbers(add, 4), requires_grad=False)
        (result,) = call(a, b)
        assert torch.equal(result, a + b)
    assert len(ran) == 1


def test_other_subclasses_run_anew(add: Add) -> None:
    class Marked(torch.Tensor):
        pass

    call, ran = operation(add)
    for _ in range(2):
        call(numbers(add, 4), numbers(add, 4).as_subclass(Marked))
    assert len(ran) == 2


def test_a_sparse_tensor_is_left_to_the_operation(add: Add) -> None:
    call, ran = operation(add)
    with pytest.raises(RuntimeError):
        call(numbers(add, 4), torch.zeros(4).to_sparse())
    assert len(ran) == 1


def test_a_negated_part_of_a_complex_tensor_is_left_to_the_operation(add: Add) -> None:
    call, ran = operation(add)
    a = torch.randn(8, 2)
    b = torch.view_as_complex(a.clone()).conj().imag
    assert b.is_neg()
    call(numbers(add, 8), a[:, 1])
    call(numbers(add, 8), b)
    assert len(ran) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_jit_trace_sees_the_operation(add: Add) -> None:
    call, ran = operation(add)
    a, b = numbers(add, 4), numbers(add, 4)
    call(a, b)
    torch.jit.trace(lambda a, b: call(a, b)[0], (a, b), check_trace=False)
    assert len(ran) == 2


@pytest.mark.parametrize("beside", ["before", "after"])
def test_work_beside_launches_is_never_left_out(add: Add, beside: str) -> None:
    def work(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, number: float) -> None:
        if beside == "before":
            b = b.clone()
        launch(add, out, a, b, number)
        if beside == "after":
            out.mul_(2)

    call, ran = operation(add, work)
    for _ in range(2):
        a, b = numbers(add, 4), numbers(add, 4)
        (result,) = call(a, b)
        assert torch.equal(result, (a + b) * (2 if beside == "after" else 1))
    assert len(ran) == 2


def test_work_around_the_implementation_is_never_left_out(add: Add) -> None:
    run = recording.watched(lambda *args: launch(add, *args))
    ran: list[int] = []

    @repeat.repeats_launches
    def call(a: torch.Tensor, b: torch.Tensor) -> Any:
        ran.append(1)
        out = torch.empty_like(a)
        run(out, a, b, 0.0)
        out.mul_(2)
        return (out,)

    for _ in range(2):
        a, b = numbers(add, 4), numbers(add, 4)
        assert torch.equal(call(a, b)[0], 2 * (a + b))
    assert len(ran) == 2


def test_scratch_is_allocated_at_every_call(add: Add) -> None:
    places: list[int] = []

    def work(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, number: float) -> None:
        scratch = torch.empty_strided(a.shape, a.stride())
        places.append(scratch.data_ptr())
        launch(add, scratch, a, b, number)
        launch(add, out, scratch, b, 0.0)

    call, ran = operation(add, work)
    kept = []
    for _ in range(2):
        a, b = numbers(add, 4), numbers(add, 4)
        kept.append(call(a, b))
        assert torch.equal(kept[-1][0], a + b + b)
    assert len(ran) == 1
    assert len(places) == 1


def test_scratch_of_zeros_is_zero_at_every_call(add: Add) -> None:
    def work(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, number: float) -> None:
        scratch = torch.zeros(a.shape)
        launch(add, scratch, scratch, a, number)
        launch(add, out, scratch, b, 0.0)

    call, ran = operation(add, work)
    for _ in range(3):
        a, b = numbers(add, 4), numbers(add, 4)
        assert torch.equal(call(a, b)[0], a + b)
    assert len(ran) == 1


def test_a_launch_that_was_not_noted_is_never_left_out(add: Add) -> None:
    """A kernel of another package, in a user's implementation."""

    def work(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, number: float) -> None:
        launch(add, out, a, b, number)
        knobs.runtime.launch_enter_hook(None)

    call, ran = operation(add, work)
    for _ in range(2):
        call(numbers(add, 4), numbers(add, 4))
    assert len(ran) == 2


def test_a_call_that_records_a_gradient_runs_anew(add: Add) -> None:
    call, ran = operation(add)
    a, b = numbers(add, 4), numbers(add, 4)
    for _ in range(2):
        call(a, b)
    b.requires_grad_()
    for expected in (2, 3):
        call(a, b)
        assert len(ran) == expected
    with torch.no_grad():
        for _ in range(2):
            call(a, b)
    assert len(ran) == 4
    call(a, b)
    assert len(ran) == 5


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize("kind", [list, tuple, Pair._make])
def test_several_tensors_in_one_argument(
    add: Add, kind: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
) -> None:
    ran: list[int] = []
    work = recording.watched(lambda *args: launch(add, *args))

    @repeat.repeats_launches
    def call(parts: Sequence[torch.Tensor]) -> Any:
        ran.append(1)
        out = torch.empty_strided(parts[0].shape, parts[0].stride())
        work(out, *parts, 0.0)
        return (out,)

    for _ in range(2):
        parts = kind([numbers(add, 4), numbers(add, 4)])
        assert torch.equal(call(parts)[0], parts[0] + parts[1])
    assert len(ran) == 1


def test_a_mode_of_torch_functions_costs_a_repeat_nothing(add: Add) -> None:
    class Counting(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    call, ran = operation(add)
    a, b, c = (numbers(add, 4) for _ in range(3))
    call(a, b)
    with Counting() as counting:
        # The stand-in for a kernel adds on the CPU, which the repeat's own reads and allocations do not.
        (result,) = call(a, c)
        seen = counting.seen
    assert torch.equal(result, a + c)
    assert len(ran) == 1
    assert seen == 0


def test_forgets(add: Add) -> None:
    call, ran = operation(add)
    a, b = numbers(add, 4), numbers(add, 4)
    call(a, b)
    repeat.forget()
    call(a, b)
    assert len(ran) == 2


def test_a_call_that_began_before_is_forgotten_too(add: Add) -> None:
    """Another thread registers an implementation while this one records the launches of the former one."""

    def work(*args: Any) -> None:
        launch(add, *args)
        if not ran[1:]:
            repeat.forget()

    call, ran = operation(add, work)
    for _ in range(3):
        call(numbers(add, 4), numbers(add, 4))
    assert len(ran) == 2


def test_the_oldest_entry_of_all_operations_makes_room(monkeypatch: pytest.MonkeyPatch, add: Add) -> None:
    monkeypatch.setattr(repeat, "_MAX_KEYS", 3)
    (first, ran_first), (second, ran_second) = operation(add), operation(add)
    sizes = {size: numbers(add, size) for size in (4, 5, 6)}
    for call, size in ((first, 4), (first, 5), (second, 4), (second, 6)):
        call(sizes[size], sizes[size])
    ran_first.clear()
    ran_second.clear()
    for call, size in ((first, 5), (second, 4), (second, 6)):
        call(sizes[size], sizes[size])
    assert not ran_first
    assert not ran_second
    first(sizes[4], sizes[4])
    assert ran_first


def test_a_profiler_sees_every_launch(add: Add) -> None:
    call, ran = operation(add)
    a, b = numbers(add, 4), numbers(add, 4)
    call(a, b)
    with counting_launches(print):
        call(a, b)
    assert len(ran) == 2


def test_an_operation_of_pytorch_is_seen_through(add: Add) -> None:
    op = register_op("test_repeat_add", mutates=("out",))(_add_through_pytorch)
    _COMPILED.append(add)
    ran: list[int] = []

    @repeat.repeats_launches
    def call(a: torch.Tensor, b: torch.Tensor) -> Any:
        ran.append(1)
        out = torch.empty_strided(a.shape, a.stride())
        op(a, b, out)
        return (out,)

    for _ in range(2):
        a, b = numbers(add, 4), numbers(add, 4)
        assert torch.equal(call(a, b)[0], a + b + a)
    assert len(ran) == 1


def test_a_backward_pass_detects_in_place_writes(add: Add) -> None:
    op = register_op("test_repeat_write", mutates=("out", "more"))(_add_into)
    _COMPILED.append(add)
    ran: list[int] = []

    @repeat.repeats_launches
    def write(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, more: list[torch.Tensor]) -> None:
        ran.append(1)
        op(a, b, out[:, None], more)

    kept = torch.ones(4, requires_grad=True)
    for _ in range(2):
        a, b, out, listed = (numbers(add, 4) for _ in range(4))
        products = [kept * tensor for tensor in (a, b, out, listed)]
        write(a, b, out, [listed])
        for product in products[:2]:
            product.sum().backward()
        for product in products[2:]:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()
    assert len(ran) == 1
    with torch.inference_mode():
        write(a, b, numbers(add, 4), [numbers(add, 4)])


_COMPILED: list[Add] = []


def _add_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, more: Sequence[torch.Tensor]) -> None:
    compiled = _COMPILED[-1]
    launch(compiled, out[:, 0], a, b, 0.0)
    launch(compiled, more[0], a, b, 0.0)


def _add_through_pytorch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    compiled = _COMPILED[-1]
    scratch = torch.empty_strided(a.shape, a.stride())
    launch(compiled, scratch, a, b, 0.0)
    launch(compiled, out, scratch, a, 0.0)
