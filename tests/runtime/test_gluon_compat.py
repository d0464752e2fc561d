"""Compile-time checks of ``gluon_compat``, without a GPU."""

# pyright: reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

import pytest
import torch

from flashlatte.runtime import machine

triton = pytest.importorskip("triton")

from support.compile import Launch, compile_gluon  # noqa: E402
from triton.compiler.errors import CompilationError  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.language.nvidia.hopper import mbarrier  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402

from flashlatte.kernels.hopper.barriers import allocate_mbarrier  # noqa: E402
from flashlatte.runtime.gluon_compat import tma_load  # noqa: E402

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")


@gluon.jit
def load_into_second_slot(numbers, total, COUNT: gl.constexpr):
    """Load COUNT float32 elements into the second slot of a ring and store them."""
    slots = gl.allocate_shared_memory(gl.float32, [2, COUNT], gl.NVMMASharedLayout(0, 32, 1))
    full = allocate_mbarrier()
    mbarrier.expect(full, 4 * COUNT)
    tma_load(numbers, [0], full, slots.index(1))
    mbarrier.wait(full, 0)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.store(total + gl.arange(0, COUNT, layout), slots.index(1).load(layout))


def compile_ring(count: int) -> int:
    """Bytes of shared memory of the kernel for slots of ``count`` elements."""
    numbers = TensorDescriptor(torch.empty(64), [64], [1], [count], gl.NVMMASharedLayout(0, 32, 1))
    arguments = {"numbers": numbers, "total": torch.empty(64), "COUNT": count}
    return compile_gluon(load_into_second_slot, Launch((1,), arguments, {"num_warps": 4})).shared


def test_tiles_that_tma_can_write_compile():
    assert compile_ring(32) >= 2 * 128


@pytest.mark.parametrize("count", [8, 16])
def test_slots_that_are_not_multiples_of_128_bytes_do_not_compile(count):
    with pytest.raises(CompilationError) as error:
        compile_ring(count)
    assert f"the size of a TMA tile must be a multiple of 128 bytes, got {4 * count}" in str(
        error.value.__cause__ or error.value
    )
