"""Repeated launches are those of the call itself, for every operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch._C._dynamo import guards
from torch.overrides import TorchFunctionMode

from flashlatte.runtime import machine, repeat

pytest.importorskip("triton")

from support import no_gpu
from support.operation_calls import CALLS, NOT_REPEATED, use_hopper

from flashlatte import flash_mla, kv_cache
from flashlatte.ops.merge_states import merge_states
from flashlatte.runtime import triton_internals, triton_kernel

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")


class Memory:
    """Maps addresses to numbers: the first address in the launches is 0, the next one 1."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def number(self, address: int) -> str:
        return f"memory {self._numbers.setdefault(address, len(self._numbers))}"


def _described(argument: Any, like: Any, memory: Memory) -> Any:
    """An argument with numbers for addresses. ``like``: the same argument of a launch with tensors."""
    if isinstance(like, torch.Tensor):
        return memory.number(argument.data_ptr() if isinstance(argument, torch.Tensor) else argument)
    if isinstance(like, tuple):
        return tuple(_described(*pair, memory) for pair in zip(argument, like, strict=True))
    if triton_internals.is_descriptor(like):
        memory_of = memory.number(argument.base.data_ptr())
        return memory_of, argument.base.dtype, argument.shape, argument.strides, argument.block_shape, argument.layout
    return argument


def _all_described(launches: list[Any], like: list[Any]) -> list[Any]:
    memory = Memory()
    return [_described(launch, other, memory) for launch, other in zip(launches, like, strict=True)]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Launches of calls with CPU tensors, which are repeated like those on a GPU."""
    monkeypatch.setattr(repeat, "_DEVICE_TYPE", "cpu")
    monkeypatch.setattr(repeat, "_FIRST_DEVICE", -1)
    monkeypatch.setattr(repeat, "_allocate", getattr(guards, "_empty_strided_cpu"))  # noqa: B009
    monkeypatch.setattr(repeat, "_current_device", lambda: None)
    monkeypatch.setattr(repeat, "_current_stream", lambda _: no_gpu.STREAM)
    repeat.forget()
    yield use_hopper(monkeypatch)
    repeat.forget()


@pytest.mark.parametrize("call", [call for call in CALLS if call not in NOT_REPEATED])
def test_repeated_launches_are_those_of_the_call(
    monkeypatch: pytest.MonkeyPatch, launches: list[Any], call: Callable[[], None]
) -> None:
    by_kernels: list[bool] = []
    launch = triton_kernel.Kernel._launch

    def counted(*args: Any, **kwargs: Any) -> None:
        by_kernels.append(True)
        launch(*args, **kwargs)

    monkeypatch.setattr(triton_kernel.Kernel, "_launch", counted)
    kept: list[Any] = []  # so that each address stands for one tensor
    append = repeat._append

    def keeping(key: list[Any], tensors: list[torch.Tensor], values: Any) -> list[int]:
        kept.append(tensors)
        return append(key, tensors, values)

    monkeypatch.setattr(repeat, "_append", keeping)

    call()
    first = launches.copy()
    launches.clear()
    assert len(first) == len(by_kernels) > 0
    by_kernels.clear()
    call()
    assert len(by_kernels) < len(first), "nothing was repeated"
    assert _all_described(launches, first) == _all_described(first, first)


def test_a_number_that_is_read_from_the_device_is_read_at_each_call(launches: list[Any]) -> None:
    cache = kv_cache.allocate("bf16", 4, 64)
    table = torch.zeros(1, 4, dtype=torch.int32)
    for tokens in (9, 5, 7):
        boundaries = torch.tensor([0, tokens], dtype=torch.int32)
        assert kv_cache.gather(cache, table, boundaries, backend="portable").shape == (tokens, 576)
    assert len(launches) == 3


def test_a_merge_into_part_of_a_stack_is_not_repeated_as_one_into_other_memory(launches: list[Any]) -> None:
    def addresses(tensors: Sequence[Any]) -> list[int]:
        return [tensor.data_ptr() if isinstance(tensor, torch.Tensor) else tensor for tensor in tensors]

    kept: list[torch.Tensor] = []
    for in_place in (True, False, False, True):
        outs, lses = torch.zeros(2, 3, 4, 64, dtype=torch.bfloat16), torch.zeros(2, 3, 4)
        out, lse = (outs[1], lses[1]) if in_place else (torch.zeros_like(outs[0]), torch.zeros_like(lses[0]))
        kept += (outs, lses, out, lse)
        launches.clear()
        merge_states(outs, lses, out=out, lse=lse, backend="portable")
        tuples = [addresses(item) for item in launches[0] if isinstance(item, tuple) and len(item) == 3]
        assert addresses((*outs, out)) in tuples
        assert addresses((*lses, lse)) in tuples


class _Counting(TorchFunctionMode):
    """Counts the calls and attribute reads seen by a mode such as that of ``torch.set_default_device``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_a_repeat_of_flash_mla_with_kvcache_costs_a_mode_nothing(launches: list[Any], sparse: bool) -> None:
    q, k_cache = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((2, 1, 64, 576), (4, 64, 1, 576)))
    arguments: dict[str, Any] = {"block_table": torch.zeros(2, 64, dtype=torch.int32)}
    arguments["cache_seqlens"] = torch.zeros(2, dtype=torch.int32)
    if sparse:
        k_cache = kv_cache.allocate("v32", 4, 64)
        arguments |= {"indices": torch.zeros(2, 1, 512, dtype=torch.int32), "is_fp8_kvcache": True}

    def call() -> None:
        schedule, _ = flash_mla.get_mla_metadata()
        flash_mla.flash_mla_with_kvcache(
            q, k_cache, head_dim_v=512, tile_scheduler_metadata=schedule, backend="hopper", **arguments
        )

    call()
    launches.clear()
    with _Counting() as counting:
        call()
    assert launches
    assert counting.seen == 0
