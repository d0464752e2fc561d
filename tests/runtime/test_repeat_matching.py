"""Which calls a recorded call stands for: those that agree with it in every property that launches depend on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.repeated_kernel import Add, launch, numbers, operation
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from flashlatte.runtime import recording, repeat


def _imaginary(dtype: torch.dtype) -> torch.Tensor:
    """The imaginary part of conjugate numbers, which PyTorch stores negated."""
    return torch.view_as_complex(torch.ones(8, 2, dtype=dtype)).conj().imag


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_negated_tensor_runs_the_operation(add: Add, dtype: torch.dtype) -> None:
    call, ran = operation(add)
    out, plain, negated = torch.zeros(8, dtype=dtype), torch.zeros(8, 2, dtype=dtype)[:, 1], _imaginary(dtype)
    assert negated.is_neg()
    assert negated.stride() == plain.stride()
    for b, expected in ((negated, 1), (negated, 2), (plain, 3), (plain, 3), (negated, 4)):
        call(out, b, out=out)
        assert len(ran) == expected


@pytest.fixture
def recorded(add: Add) -> tuple[Callable[[torch.Tensor], None], torch.Tensor, list[int]]:
    """An operation with one argument, an argument for which it is repeated, and a list that grows when it runs."""
    ran: list[int] = []

    @repeat.repeats_launches
    def call(a: torch.Tensor) -> None:
        ran.append(1)
        if len(ran) == 1:
            recording.watched(lambda: launch(add, a, a, a, 0.0))()

    a = numbers(add, 4)
    call(a)
    call(a)
    assert len(ran) == 1
    return call, a, ran


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("entered", [_Mode, FakeTensorMode, forward_ad.dual_level])
def test_a_mode_runs_the_operation(recorded: Any, entered: Callable[[], Any]) -> None:
    call, a, ran = recorded
    with entered():
        call(a)
    assert len(ran) == 2
    call(a)
    assert len(ran) == 2


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad, torch.func.functionalize])
def test_a_transform_runs_the_operation(recorded: Any, transform: Any) -> None:
    call, a, ran = recorded

    def transformed(x: torch.Tensor) -> torch.Tensor:
        call(a)
        call(x)
        return x.sum()

    transform(transformed)(torch.ones(4))
    assert len(ran) == 3


def test_a_fake_tensor_runs_the_operation(recorded: Any) -> None:
    call, a, ran = recorded
    call(FakeTensorMode().from_tensor(a))
    assert len(ran) == 2


def test_entries_of_other_strides_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch, add: Add) -> None:
    monkeypatch.setattr(repeat, "_MAX_ENTRIES_OF_KEY", 2)
    call, ran = operation(add)

    def call_with_stride(stride: int) -> int:
        a = numbers(add, 4, 4 * stride)[:, ::stride]
        add.known(a)
        assert torch.equal(call(a, a)[0], a + a)
        return len(ran)

    assert [call_with_stride(stride) for stride in (1, 2, 1, 2, 3, 2, 3, 1)] == [1, 2, 2, 2, 3, 3, 3, 4]


def test_an_entry_keeps_no_tensor_alive(add: Add) -> None:
    call, _ = operation(add)
    a = torch.randn(4)
    call(a, a, out=a)
    add.memory.clear()
    kept = weakref.ref(a)
    del a
    assert kept() is None


def test_nothing_is_repeated_without_guards_on_tensors(monkeypatch: pytest.MonkeyPatch, add: Add) -> None:
    monkeypatch.setattr(repeat, "_Guards", None)
    call, ran = operation(add)
    for _ in range(2):
        call(numbers(add, 4), numbers(add, 4))
    assert len(ran) == 2
