"""Public names of packages, imported at first access, so that importing the library is fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

_targets: dict[str, dict[str, str]] = {}


def declare(package: str, names: Mapping[str, str]) -> None:
    """Add lazy names to a package that calls ``attach``: each maps to "module:name", or to a module."""
    _targets.setdefault(package, {}).update(names)


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package, for its declared names; ``__dir__`` also lists its ``__all__``."""

    def get(name: str) -> Any:
        target = _targets.get(package, {}).get(name)
        if target is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = target.partition(":")
        value = importlib.import_module(module)
        if attribute:
            value = getattr(value, attribute)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*getattr(sys.modules[package], "__all__", ()), *_targets.get(package, ())})

    return get, names
