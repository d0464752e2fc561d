"""Checks of an operation's registration with PyTorch: schema, fake, and torch.compile without a graph break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import torch


def opcheck(module: ModuleType, name: str, call: Callable[[], object], op_name: str | None = None) -> None:
    """torch.library.opcheck on the operation ``module._name``, with the arguments that ``call`` gives it."""
    with mock.patch.object(module, f"_{name}") as operation:
        call()
    params, *others = operation.call_args.args
    # The function may take a record; the registered operation takes its fields.
    arguments = (*params, *others) if hasattr(params, "_fields") else (params, *others)
    torch.library.opcheck(getattr(torch.ops.flashlatte, op_name or name).default, arguments)


def assert_compiles(function: Callable[..., Sequence[torch.Tensor]], *cases: dict[str, Any]) -> None:
    """Check that ``function``, compiled as one graph, returns bitwise equal results with equal strides for each
    case."""
    torch.compiler.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    for case in cases:
        for result, expected in zip(compiled(**case), function(**case), strict=True):
            assert result.equal(expected)
            assert result.stride() == expected.stride()
