"""Kernel arguments by name."""

from __future__ import annotations

import itertools
from typing import Any


def by_name(kernel: Any, *groups: Any, **values: Any) -> tuple[Any, ...]:
    """The run-time arguments of ``kernel`` in the order of its parameters, up to the first constant (in upper case).

    Args:
        groups: named tuples of arguments that several kernels share; fields without a parameter are ignored.
        values: further arguments, which override fields of the same name.

    Raises:
        KeyError: the name of a missing argument.
    """
    arguments: dict[str, Any] = {}
    for group in groups:
        arguments |= group._asdict()
    arguments |= values
    return tuple(arguments[name] for name in itertools.takewhile(lambda name: not name.isupper(), kernel.arg_names))
