"""Shared parts of the GPU tests: reduced test grids, poisoned outputs, CUDA graphs, counts of compiled kernels."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

DEVICE = torch.device("cuda")
KERNEL_BACKENDS = ("hopper", "portable")
UNBUILT = "in this version"
DRAWS = 40


T = TypeVar("T")
Arguments = dict[str, Any]
Results = dict[str, torch.Tensor]


def pairwise(
    axes: Mapping[str, Sequence[Any]], allowed: Callable[[Arguments], bool] = lambda _: True
) -> list[Arguments]:
    """A small, deterministic subset of a grid in which every allowed pair of values of two axes occurs."""
    rng = random.Random(0)
    missing = {
        ((first, x), (second, y)): None
        for first, second in itertools.combinations(axes, 2)
        for x, y in itertools.product(range(len(axes[first])), range(len(axes[second])))
    }
    chosen = []
    while missing:
        pair = next(iter(missing))
        drawn = [{name: rng.randrange(len(values)) for name, values in axes.items()} | dict(pair) for _ in range(DRAWS)]
        rows = [row for row in drawn if allowed(_values(axes, row))]
        if not rows:  # a pair that is not allowed in any row
            del missing[pair]
            continue
        best = max(rows, key=lambda row: sum(covered in missing for covered in itertools.combinations(row.items(), 2)))
        for covered in itertools.combinations(best.items(), 2):
            missing.pop(covered, None)
        chosen.append(_values(axes, best))
    return chosen


def _values(axes: Mapping[str, Sequence[Any]], row: Mapping[str, int]) -> Arguments:
    return {name: axes[name][index] for name, index in row.items()}


def ids(rows: Sequence[Arguments]) -> list[str]:
    return [",".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in row.items()) for row in rows]


@contextmanager
def refusals_skip(backend: str) -> Iterator[None]:
    """Skip a test if a backend is not implemented, or if a backend other than ``portable`` does not support the
    call."""
    try:
        yield
    except ValueError as error:
        if "cannot serve this call" in str(error) and (backend != "portable" or UNBUILT in str(error)):
            pytest.skip(str(error))
        raise


def replaced(arguments: Arguments, **changes: Any) -> Arguments:
    """The arguments with some of them replaced."""
    return arguments | changes


def nan_outputs(**outputs: torch.Tensor) -> Arguments:
    """The same tensors filled with NaN, to be passed as ``out=`` and ``lse=``."""
    return {name: output.fill_(torch.nan) for name, output in outputs.items()}


def poisoned_decode_outputs(arguments: Arguments) -> Arguments:
    """``out=`` and ``lse=`` of dense and sparse decode, filled with NaN."""
    q = arguments["q"]
    batch, s_q, h_q, _ = q.shape
    return nan_outputs(
        out=q.new_empty(batch, s_q, h_q, arguments.get("head_dim_v", 512)),
        lse=torch.empty(batch, s_q, h_q, device=q.device).transpose(1, 2),
    )


def assert_same_bits(first: Results, second: Results) -> None:
    for name, result in first.items():
        assert torch.equal(bits(result), bits(second[name])), f"{name} differs from one run to the next"


def bits(x: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integers[x.dtype.itemsize])


def assert_compiles(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, compiler: str = "aot_eager"
) -> None:
    """Check that torch.compile makes one graph of the function, with the eager result."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0)


def captured(call: Callable[[], T]) -> tuple[Callable[[], None], T]:
    """A CUDA graph of one call, as a function that replays it, and the results that a replay overwrites."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph.replay, results


COMBINE = "flashlatte.split_kv.combine.combine_kernel"


def compiled_variants() -> dict[str, int]:
    """The number of variants of each kernel of this package that have been compiled in this process."""
    from flashlatte.runtime.triton_kernel import Kernel

    modules = [module for name, module in list(sys.modules.items()) if name.startswith("flashlatte")]
    kernels = {id(value): value for module in modules for value in vars(module).values()}
    counts = {}
    for kernel in kernels.values():
        if isinstance(kernel, Kernel):
            jitted = kernel.jitted
            name = f"{jitted.fn.__module__}.{jitted.fn.__qualname__}"
            counts[name] = sum(len(caches[0]) for caches in jitted.device_caches.values())
    return counts


@contextmanager
def no_compilation() -> Iterator[None]:
    """Fails if a kernel of this package is compiled inside.

    But for one more tile shape of the combine: it has three, by how many results there are to merge.
    """
    before = compiled_variants()
    yield
    after = compiled_variants()
    new = {name: count for name, count in after.items() if count > before.get(name, 0) + (name == COMBINE)}
    assert not new, f"compiled again: {new}, before: {before}"
