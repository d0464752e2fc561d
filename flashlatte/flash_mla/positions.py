"""Arguments whose position differs between the versions of FlashMLA."""

from __future__ import annotations

from typing import Any


def by_name(function: str, values: tuple[Any, ...], upstream: tuple[str, ...], vllm: tuple[str, ...]) -> dict[str, Any]:
    """Names of the last positional arguments of a call.

    Args:
        function: of the call, for errors.
        values: the arguments.
        upstream: their names in FlashMLA and sgl-flash-mla, where the first is a bool.
        vllm: their names in vLLM's copy, where the first is ``out``, a tensor or None.

    Raises:
        TypeError: more arguments than names.
    """
    names = upstream if isinstance(values[0], bool) else vllm
    if len(values) > len(names):
        raise TypeError(
            f"{function} has at most {len(names)} positional arguments from {names[0]} on, got {len(values)}"
        )
    return dict(zip(names, values, strict=False))
