"""A kernel's arguments, by name."""

from __future__ import annotations

import itertools
from typing import Any


def by_name(kernel: Any, *groups: Any, **values: Any) -> tuple[Any, ...]:
    """The run-time arguments of ``kernel`` in its order: those before its constants, whose names are upper case.

    Args:
        groups: named tuples of arguments that several kernels share; a kernel takes of each what it names.
        values: further arguments, which precede those of groups.

    Raises:
        KeyError: the name of an argument that is missing.
    """
    given: dict[str, Any] = {}
    for group in groups:
        given |= group._asdict()
    given |= values
    return tuple(given[name] for name in itertools.takewhile(lambda name: not name.isupper(), kernel.arg_names))
