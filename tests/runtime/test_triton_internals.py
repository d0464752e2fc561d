"""Assumptions of ``triton_internals`` about Triton, and the fallback if one fails."""

# Triton's annotations are not Python's.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("triton")

from support import no_gpu
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.experimental.gluon import language as gl

from flashlatte.runtime import machine, triton_internals
from flashlatte.runtime.tma_descriptors import describe
from flashlatte.runtime.triton_internals import ClusterLaunch, Descriptor, Pointer, RepeatableLaunch
from flashlatte.runtime.triton_kernel import gluon_kernel

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")


def _plain(x, y, pair, n: gl.int32, scale: gl.float32, SIZE: gl.constexpr):
    pass


def _described(first, x, second, n: gl.int32, SIZE: gl.constexpr):
    pass


def _tensors(count: int) -> list[torch.Tensor]:
    return [torch.zeros(8, 64, dtype=torch.bfloat16) for _ in range(count)]


def _plain_arguments(tensors: list[Any]) -> list[Any]:
    x, y, first, second = tensors
    return [x, y, (first, 3, second), 7, 0.5, 64]


def _described_arguments(tensors: list[Any]) -> list[Any]:
    a, x, b, _ = tensors
    boxes = [describe(a, (8, 64), (64,), (8, 64)), describe(b, (4, 64), (128,), (4, 64))]
    return [boxes[0], x, boxes[1], 7, 64]


ARGUMENTS = {_plain: _plain_arguments, _described: _described_arguments}


def _without_tensors(arguments: list[Any], tensors: list[torch.Tensor]) -> list[Any]:
    """The arguments as ``repeat`` passes them on."""
    number = {tensor.data_ptr(): number for number, tensor in enumerate(tensors)}

    def one(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return Pointer(number[argument.data_ptr()])
        if isinstance(argument, tuple):
            return tuple(map(one, argument))
        if triton_internals.is_descriptor(argument):
            return Descriptor(number[argument.base.data_ptr()], triton_internals.without_memory(argument))
        return argument

    return [one(argument) for argument in arguments]


def _addresses(value: Any) -> Any:
    """The addresses that a driver would get for a launch's arguments."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return tuple(map(_addresses, value)) if isinstance(value, (list, tuple)) else value


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records the launches passed to the driver."""
    return []


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, launched: list[Any], function: Any) -> Any:
    load = no_gpu.use_launcher(monkeypatch, lambda *arguments: launched.append(_addresses(arguments)))
    *positional, size = ARGUMENTS[function](_tensors(4))
    return load(gluon_kernel(function).jitted.warmup(*positional, SIZE=size, grid=(1,)))


@pytest.mark.parametrize("function", [_plain, _described])
@pytest.mark.parametrize("known", [True, False], ids=["known launcher", "unknown launcher"])
def test_a_repeat_launches_as_triton_does(
    monkeypatch: pytest.MonkeyPatch, compiled: Any, launched: list[Any], function: Any, known: bool
) -> None:
    first, others = _tensors(4), [_tensors(4) for _ in range(2)]
    if not known:
        monkeypatch.setattr(triton_internals, "_innermost", lambda _: None)
    repeat = RepeatableLaunch(compiled, (5, 2), _without_tensors(ARGUMENTS[function](first), first))
    assert not launched
    for tensors in (*others, first, others[0]):
        head = (5, 2, 1, no_gpu.STREAM, compiled.function, compiled.packed_metadata, None, None, None)
        compiled.run(*head, *ARGUMENTS[function](tensors))
        repeat(no_gpu.STREAM, [tensor.data_ptr() for tensor in tensors])
        expected, repeated = launched[-2:]
        assert repeated == expected


@pytest.mark.parametrize("function", [_plain, _described])
def test_the_driver_is_called_without_triton_s_launcher(
    monkeypatch: pytest.MonkeyPatch, compiled: Any, launched: list[Any], function: Any
) -> None:
    tensors = _tensors(4)
    repeat = RepeatableLaunch(compiled, (5,), _without_tensors(ARGUMENTS[function](tensors), tensors))
    launcher = type(compiled.run)
    monkeypatch.setattr(launcher, "__call__", lambda *_: pytest.fail("went through Triton's launcher"))
    for _ in range(2):
        repeat(no_gpu.STREAM, [tensor.data_ptr() for tensor in tensors])
    assert len(launched) == 2


@pytest.mark.parametrize("function", [_plain])
@pytest.mark.parametrize("attribute", ["global_scratch_size", "profile_scratch_size"])
def test_a_launcher_that_allocates_is_left_to_do_so(compiled: Any, attribute: str) -> None:
    assert triton_internals._innermost(compiled.run) is not None
    setattr(compiled.run, attribute, 16)
    assert triton_internals._innermost(compiled.run) is None


def test_triton_tells_of_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of compiled code calls the hooks, for both ways of launching."""
    counted: list[Any] = []
    no_gpu.use_without_compiling(monkeypatch)
    kernels = [gluon_kernel(_plain), gluon_kernel(_plain, cluster=ClusterLaunch(2, 64))]
    for kernel in kernels:
        with triton_internals.counting_launches(counted.append):
            assert triton_internals.hooked()
            kernel[(2,)](*_plain_arguments(_tensors(4))[:-1], SIZE=64)
    assert not triton_internals.hooked()
    assert len(counted) == 2


def test_only_the_launch_depends_on_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = no_gpu.use_without_compiling(monkeypatch)
    kernel = gluon_kernel(_plain, cluster=ClusterLaunch(2, 64))
    arguments = _plain_arguments(_tensors(4))
    for _ in range(2):
        kernel[(3,)](*arguments[:-1], SIZE=64)
        (launch,) = launches
        assert launch == ((3, 1, 1), no_gpu.STREAM, "_plain", (12, 2, 1064), *arguments)
        launches.clear()


def test_clusters_are_packed_as_assumed() -> None:
    assert triton_internals.packs_clusters(make_backend(GPUTarget("cuda", 90, 32)))
    assert not triton_internals.packs_clusters(MagicMock(pack_metadata=lambda metadata: (metadata.num_warps,)))
    assert not triton_internals.clusters_fill(torch.device("cpu"), 2)
