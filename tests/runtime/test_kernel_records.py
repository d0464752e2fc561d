"""Kernels that take records."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from support.compile import Recorder, compile_launch  # noqa: E402

from flashlatte.runtime import machine  # noqa: E402
from flashlatte.runtime.kernel_records import (  # noqa: E402
    Constant,
    ElementPointer,
    Int32,
    Int64,
    OptionalInt32,
    flat_records,
)
from flashlatte.runtime.triton_kernel import kernel  # noqa: E402

compiled_only = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")


class Vector(NamedTuple):
    start: ElementPointer
    stride: Int64
    size: Int32
    repeats: OptionalInt32 = None


class Pair(NamedTuple):
    source: Vector
    target: Vector
    factor: Constant


@kernel
def scale_kernel(pair: Pair, offset: tl.int32, BLOCK: tl.constexpr):
    """target[i] = source[i] · factor + offset."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < pair.source.size
    value = tl.load(pair.source.start + index * pair.source.stride, mask=inside)
    target = pair.target.start + index * pair.target.stride
    if pair.target.repeats is None:
        tl.store(target, value * pair.factor + offset, mask=inside)
    else:
        for _ in range(pair.target.repeats):
            tl.store(target, value * pair.factor + offset, mask=inside)


def pair(size: int, stride: int = 1, repeats: int | None = None, factor: float = 2.0) -> Pair:
    source, target = torch.arange(size * stride, dtype=torch.float32), torch.zeros(size)
    return Pair(Vector(source, stride, size), Vector(target, 1, size, repeats), factor)


@pytest.mark.interpreter
@pytest.mark.parametrize(("size", "stride"), [(1, 1), (7, 3), (100, 2)])
def test_a_launch_passes_records(size: int, stride: int) -> None:
    arguments = pair(size, stride)
    scale_kernel[(-(-size // 32),)](arguments, offset=5, BLOCK=32)
    expected = arguments.source.start[::stride] * 2 + 5
    assert arguments.target.start.equal(expected)


def test_a_parameter_for_each_field() -> None:
    of_source = ["pair_source_start", "pair_source_stride", "pair_source_size", "pair_source_repeats"]
    of_target = [name.replace("source", "target") for name in of_source]
    assert list(inspect.signature(scale_kernel.jitted.fn).parameters) == [
        *of_source,
        *of_target,
        "pair_factor",
        "offset",
        "BLOCK",
    ]


@compiled_only
def test_run_time_fields_are_not_specialized() -> None:
    recorder = Recorder(scale_kernel)
    variants = set()
    for call in (pair(1), pair(16, stride=16), pair(100, stride=3)):
        recorder[(1,)](call, offset=1, BLOCK=32)
        variants.add(compile_launch(scale_kernel, recorder.launches[-1], 80).sass)
    assert len(variants) == 1


@compiled_only
@pytest.mark.parametrize(("repeats", "loops"), [(None, False), (1, True), (3, True)])
def test_none_is_a_compile_time_value(repeats: int | None, loops: bool) -> None:
    recorder = Recorder(scale_kernel)
    recorder[(1,)](pair(8, repeats=repeats), offset=1, BLOCK=32)
    code = compile_launch(scale_kernel, recorder.launches[0], 80)
    assert ("scf.for" in code.ttgir) == loops


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "must pass pair, and all else by name; got 0 arguments"),
        ([pair(1), 5], "got 2 arguments without a name"),
        ([(1, 2, 3)], "pair must be a Pair, got tuple"),
        ([Pair(pair(1).source, 4, 1.0)], "pair_target must be a Vector, got int"),  # type: ignore[arg-type]
    ],
)
def test_rejects_arguments_that_are_not_records(arguments: list[Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        flat_records({"pair": Pair}, {}, arguments)


def test_a_kernel_without_records_takes_any_arguments() -> None:
    assert flat_records({}, {}, [1, (2, 3)]) == (1, (2, 3))


def test_refuses_a_field_of_no_kind() -> None:
    class Untyped(NamedTuple):
        start: Any

    def untyped_kernel(vector: Any) -> None: ...

    untyped_kernel.__annotations__["vector"] = Untyped
    with pytest.raises(TypeError, match="vector_start of untyped_kernel must be a record, a scalar"):
        kernel(untyped_kernel)


def test_fields_that_are_the_same_have_one_parameter() -> None:
    same = {"pair_target_size": "pair_source_size"}
    shared = kernel(scale_kernel.jitted.fn.__globals__["body"].fn, same=same)
    assert "pair_target_size" not in inspect.signature(shared.jitted.fn).parameters
    values = flat_records({"pair": Pair}, same, [pair(4)])
    assert len(values) == len(flat_records({"pair": Pair}, {}, [pair(4)])) - 1
    different = pair(4)._replace(target=pair(5).target)
    with pytest.raises(ValueError, match="pair_target_size must be pair_source_size, 4, got 5"):
        flat_records({"pair": Pair}, same, [different])


def test_refuses_a_field_that_tritons_tuples_have() -> None:
    class Column(NamedTuple):
        values: ElementPointer

    def column_kernel(column: Any) -> None: ...

    column_kernel.__annotations__["column"] = Column
    with pytest.raises(TypeError, match="Column must have no field values"):
        kernel(column_kernel)
