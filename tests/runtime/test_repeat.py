"""Calls that repeat their launches, with a stand-in for a compiled kernel that adds on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs

from flashlatte.runtime import recording, repeat
from flashlatte.runtime.torch_op import register_op
from flashlatte.runtime.triton_internals import counting_launches

STREAM = 77


class Add:
    """A compiled kernel: writes a + b + number to out, which it finds by address."""

    def __init__(self) -> None:
        self.function, self.packed_metadata = "function", "metadata"
        self.memory: dict[int, torch.Tensor] = {}
        self.launches = 0

    def run(self, *arguments: Any) -> None:
        columns, rows, layers, stream, function, metadata, _, _, _, out, a, b, number = arguments
        assert (columns, rows, layers, stream, function, metadata) == (3, 1, 1, STREAM, "function", "metadata")
        self.launches += 1
        with _disable_current_modes():  # a GPU's work is no operation of PyTorch
            self.memory[out].copy_(self.memory[a] + self.memory[b] + number)

    def known(self, *tensors: torch.Tensor) -> None:
        self.memory |= {tensor.data_ptr(): tensor for tensor in tensors}


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Add:
    compiled = Add()
    repeat.forget()
    monkeypatch.setattr(repeat, "_DEVICE_TYPE", "cpu")
    monkeypatch.setattr(repeat, "_FIRST_DEVICE", -1)
    monkeypatch.setattr(repeat, "_current_device", lambda: None)
    monkeypatch.setattr(repeat, "_current_stream", lambda device: STREAM)

    def allocate(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty_strided(shape, stride, dtype=dtype)
        compiled.known(tensor)
        return tensor

    monkeypatch.setattr(repeat, "_allocate", allocate)
    return compiled


def launch(compiled: Add, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, number: float) -> None:
    compiled.known(out, a, b)
    compiled.run(
        3, 1, 1, STREAM, "function", "metadata", None, None, None, *(x.data_ptr() for x in (out, a, b)), number
    )
    knobs.runtime.launch_enter_hook(None)  # as Triton's launcher does
    recording.record_launch(compiled, (3,), (out, a, b, number))


def operation(compiled: Add, implementation: Callable[..., None] | None = None) -> tuple[Any, list[int]]:
    """An operation over ``launch``, and a list that grows with every call that runs its Python."""
    ran: list[int] = []
    work = recording.watched(implementation or (lambda *args: launch(compiled, *args)))

    @repeat.repeats_launches
    def add(a: torch.Tensor, b: torch.Tensor, *, number: float = 0.0, out: torch.Tensor | None = None) -> Any:
        ran.append(1)
        if isinstance(number, bool):
            raise TypeError("number must be a number")
        result = torch.empty_strided(a.shape, a.stride()) if out is None else out
        work(result, a, b, number)
        return (result,)

    return add, ran


def numbers(compiled: Add, *shape: int) -> torch.Tensor:
    x = torch.randn(*shape)
    compiled.known(x)
    return x


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
    ],
    ids=["number", "strides", "alignment"],
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


def test_tensors_that_share_memory_are_not_confused(add: Add) -> None:
    call, ran = operation(add)
    a, b = numbers(add, 4), numbers(add, 4)
    for first, second in ((a, a), (b, b), (a, b), (b, a), (b, b)):
        (result,) = call(first, second)
        assert torch.equal(result, first + second)
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
    """An operation may refuse an output that is an input; that others share memory already hides none."""
    call, ran = operation(add)
    a, b = numbers(add, 4), numbers(add, 4)
    call(a, a, out=b)
    assert len(ran) == 1
    call(a, a, out=a)
    assert len(ran) == 2


def test_a_view_from_within_an_argument_is_not_another_argument(add: Add) -> None:
    """The launch takes the second row of ``rows``, where ``b`` begins in some of the calls."""
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
    """As a latent and its rope: the first spans the beginning of the second."""
    call, ran = operation(add)
    for is_one_tensor in (True, True, False):
        columns, others = numbers(add, 3, 8), numbers(add, 3, 8)
        a, b = columns[:, :4], (columns if is_one_tensor else others)[:, 4:]
        add.known(a, b)
        assert torch.equal(call(a, b)[0], a + b)
    assert len(ran) == 1


def test_an_argument_within_another_one_is_told_by_its_distance(add: Add) -> None:
    """The launch takes views, which could be of either argument."""
    call, ran = operation(add, lambda out, a, b, number: launch(add, out, a.view(-1), b.view(-1), number))
    for first, expected in ((1, 1), (1, 1), (2, 2), (2, 2), (1, 3)):
        rows = numbers(add, 9, 4)
        a, b = rows[:3].view(-1), rows[first : first + 3].view(-1)
        add.known(a, b)
        assert torch.equal(call(a, b)[0], a + b)
        assert len(ran) == expected


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
    """A kernel that is not this package's, in an implementation that somebody registered."""

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
    call(a, b.requires_grad_())
    assert len(ran) == 2
    with torch.no_grad():
        call(a, b)
    assert len(ran) == 2


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


def test_the_oldest_entry_of_all_operations_makes_room(monkeypatch: pytest.MonkeyPatch, add: Add) -> None:
    monkeypatch.setattr(repeat, "_MAX_ENTRIES", 3)
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


def test_a_backward_pass_knows_of_every_write(add: Add) -> None:
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
