"""The base class of problems: their names, and their reduced sizes on a machine without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

LARGEST = {
    **dict.fromkeys(("batch", "requests", "pages"), 2),
    **dict.fromkeys(("heads", "h_q", "rows", "queries", "s_q"), 16),
    **dict.fromkeys(("topk", "extra_topk", "k", "blocks"), 64),
    **dict.fromkeys(("keys", "s_kv", "tokens", "extra_tokens", "width", "hidden"), 256),
}
P = TypeVar("P", bound="Problem")


def named(default: Any, suffix: str) -> Any:
    """A field that appears in the problem's name unless it has its default: as ``suffix``, with its value for {}."""
    return field(default=default, metadata={"suffix": suffix})


@dataclass(frozen=True)
class Problem:
    """The sizes of a call. A subclass gives its operation, and the pattern of its name with fields in braces, unless it
    defines ``name``.
    """

    operation: ClassVar[str]
    _pattern: ClassVar[str]
    # Every kind of problem by the name of its class.
    kinds: ClassVar[dict[str, type[Problem]]] = {}

    def __init_subclass__(cls, operation: str, pattern: str = "") -> None:
        cls.operation, cls._pattern = operation, pattern
        Problem.kinds[cls.__name__] = cls

    @property
    def name(self) -> str:
        values = vars(self)
        others = (one for one in fields(self) if "suffix" in one.metadata and values[one.name] != one.default)
        return self._pattern.format_map(values) + "".join(
            one.metadata["suffix"].format(values[one.name]) for one in others
        )

    def scaled_down(self: P) -> P:
        """The same problem with each size limited by ``LARGEST``."""
        smaller: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Problem):
                smaller[name] = value.scaled_down()
            elif name in LARGEST:
                smaller[name] = min(value, LARGEST[name])
        return replace(self, **smaller)
