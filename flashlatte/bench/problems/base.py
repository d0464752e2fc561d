"""The base class of problems: their names, and their reduced sizes on a machine without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

LARGEST = {
    **dict.fromkeys(("batch", "requests", "pages"), 2),
    **dict.fromkeys(("heads", "h_q", "rows", "queries", "s_q"), 16),
    **dict.fromkeys(("topk", "extra_topk", "k", "blocks"), 64),
    **dict.fromkeys(("keys", "s_kv", "tokens", "extra_tokens", "width", "hidden"), 256),
}
P = TypeVar("P", bound="Problem")


@dataclass(frozen=True)
class Problem:
    """The sizes of a call. A subclass gives its operation, and the pattern of its name with fields in braces, unless it
    defines ``name``.
    """

    operation: ClassVar[str]
    _pattern: ClassVar[str]

    def __init_subclass__(cls, operation: str, pattern: str = "") -> None:
        cls.operation, cls._pattern = operation, pattern

    @property
    def name(self) -> str:
        return self._pattern.format_map(vars(self))

    def scaled_down(self: P) -> P:
        """The same problem with each size limited by ``LARGEST``."""
        smaller: dict[str, Any] = {}
        for field, value in vars(self).items():
            if isinstance(value, Problem):
                smaller[field] = value.scaled_down()
            elif field in LARGEST:
                smaller[field] = min(value, LARGEST[field])
        return replace(self, **smaller)
