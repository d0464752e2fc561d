"""Calls of operations whose kernels are emulated, with tensors on the CPU."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
from support.emulator.global_memory import GlobalMemory
from support.emulator.machine import Machine
from support.emulator.program import parse
from support.emulator.tensor_maps import TensorMap
from support.recording import Recorded, Recording
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import create_function_from_signature

from flashlatte.runtime import dispatch

SWIZZLES = (0, 32, 64, 128)


class Emulation(Recording):
    """Runs launches of implementations for Hopper: ``emulation("dense_decode", "hopper", params)``, or while it is
    ``running``, public functions with ``backend="hopper"``.

    Args:
        num_sms: of the GPU. Fewer make fewer CTAs, of which each takes about a second.
        seed, late, finds_races: as in ``Machine``.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        num_sms: int = 8,
        seed: int = 0,
        late: bool = True,
        finds_races: bool = True,
    ) -> None:
        super().__init__(monkeypatch, num_sms=num_sms)
        select = dispatch.select
        monkeypatch.setattr(dispatch, "select", lambda call, backend: backend or select(call, backend))
        self._options: dict[str, Any] = {"seed": seed, "late": late, "finds_races": finds_races}

    @contextlib.contextmanager
    def running(self) -> Iterator[Emulation]:
        """Until it ends, calls with CPU tensors run on the emulated GPU."""
        with self.assuming(90):
            yield self

    def _record(self, launched: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        super()._record(launched, grid, *args, **kwargs)
        cluster = getattr(launched, "cluster", None)
        run(self._found[-1], 1 if cluster is None else cluster.size, **self._options)


def run(recorded: Recorded, cluster: int, **options: Any) -> None:
    """Emulate a recorded launch in clusters of ``cluster`` CTAs; the results are in the tensors of its arguments."""
    compiled, arguments = _compile(recorded)
    memory = GlobalMemory()
    for value in arguments.values():
        if isinstance(value, torch.Tensor):
            memory.add(value.untyped_storage().data_ptr(), value.untyped_storage().nbytes())
    for value in arguments.values():
        if hasattr(value, "block_shape"):
            memory.add(value.base.data_ptr(), _bytes_of_described(value))
    shared = compiled.metadata.shared + recorded.shared_beside
    machine = Machine(parse(compiled.asm["ptx"]), memory, shared, **options)
    _pass(machine, compiled, arguments)
    x, y, z = (*recorded.launch.grid, 1, 1)[:3]
    with np.errstate(all="ignore"):
        machine.run((x * cluster, y, z), cluster)
    memory.copy_back()


def _compile(recorded: Recorded) -> tuple[Any, dict[str, Any]]:
    """The compiled kernel, and the arguments that are not compile-time constants."""
    kernel, launch = recorded.kernel, recorded.launch
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(**launch.arguments, **launch.options)
    options, signature, constants, attributes = kernel._pack_args(
        backend, dict(launch.options), bound, specialization, options
    )
    source = (GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource)(
        kernel, signature, constants, attributes
    )
    compiled = triton.compile(source, target=target, options=options.__dict__)
    passed = {name: launch.arguments[name] for name, kind in signature.items() if kind != "constexpr"}
    return compiled, passed


def _bytes_of_described(descriptor: Any) -> int:
    last = sum((size - 1) * stride for size, stride in zip(descriptor.shape, descriptor.strides, strict=True))
    return (last + 1) * descriptor.base.dtype.itemsize


def _pass(machine: Machine, compiled: Any, arguments: dict[str, Any]) -> None:
    """Set the kernel's parameters: a descriptor is one, followed by its shape and its strides."""
    maps = iter(compiled.metadata.tensordesc_meta or ())
    values: list[bytes] = []
    sizes = [size for _, size in machine.program.parameters]
    for value in arguments.values():
        if isinstance(value, torch.Tensor):
            values.append(struct.pack("<Q", machine.memory.address(value.data_ptr())))
        elif hasattr(value, "block_shape"):
            meta = next(maps)
            element = meta["elem_size"]
            machine.tensor_maps[len(values)] = TensorMap(
                machine.memory.address(value.base.data_ptr(), _bytes_of_described(value)),
                value.shape,
                [stride * element for stride in value.strides],
                meta["block_size"],
                element,
                SWIZZLES[meta["swizzle"]],
            )
            values.append(bytes(128))
            values += [struct.pack("<i", size) for size in value.shape]
            values += [struct.pack("<q", stride) for stride in value.strides]
        elif isinstance(value, float):
            values.append(struct.pack("<f", value))
        else:
            size = sizes[len(values)]
            values.append((int(value) % 2 ** (8 * size)).to_bytes(size, "little"))
    # Triton's own scratch memory, which these kernels do not have.
    values += [bytes(size) for size in sizes[len(values) :]]
    assert [len(value) for value in values] == sizes, compiled.name
    machine.parameters = dict(enumerate(values))
