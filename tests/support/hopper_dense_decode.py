"""Calls of the Hopper kernel of dense decode, as its launcher launches them, without the GPU."""

from __future__ import annotations

from typing import Any

from support import attention_calls

from flashlatte.ops.dense_decode.hopper import launch


def decode(**call: Any) -> None:
    """A call of the implementation with tensors of arbitrary contents: ``attention_calls.dense_decode``."""

    def run(operation: str, backend: str, *arguments: Any, arch: int | None) -> list[attention_calls.Recorded]:
        launch.dense_decode(*arguments)
        return []

    attention_calls.dense_decode(run, "hopper", **call)
