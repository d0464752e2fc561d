"""Positional arguments whose order differs between versions of FlashMLA."""

from __future__ import annotations

from typing import Any


def by_name(function: str, values: tuple[Any, ...], upstream: tuple[str, ...], vllm: tuple[str, ...]) -> dict[str, Any]:
    """Map the last positional arguments of a call to their names.

    Args:
        function: name of the function, for errors.
        values: the positional arguments.
        upstream: names in FlashMLA and sgl-flash-mla, where the first argument is a bool.
        vllm: names in vLLM's copy, where the first argument is ``out``, a tensor or None.

    Raises:
        TypeError: more arguments than names.
    """
    names = upstream if isinstance(values[0], bool) else vllm
    if len(values) > len(names):
        raise TypeError(
            f"{function} has at most {len(names)} positional arguments from {names[0]} on, got {len(values)}"
        )
    return dict(zip(names, values, strict=False))
