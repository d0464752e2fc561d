"""The largest sizes on a machine without a GPU, which runs the same code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, TypeVar

SMALL_BATCH, SMALL_HEADS, SMALL_KEYS, SMALL_TOPK, SMALL_QUERIES = 2, 16, 256, 64, 16

LARGEST = {
    "batch": SMALL_BATCH,
    "requests": SMALL_BATCH,
    "heads": SMALL_HEADS,
    "keys": SMALL_KEYS,
    "tokens": SMALL_KEYS,
    "topk": SMALL_TOPK,
    "queries": SMALL_QUERIES,
    "hidden": SMALL_KEYS,
    "pages": SMALL_BATCH,
}
P = TypeVar("P", bound="Scaled")


class Scaled:
    """A problem whose sizes named in ``LARGEST`` are reduced.

    ``name_pattern``: its name, with fields in braces, if it has no ``name`` of its own.
    """

    name_pattern: ClassVar[str]

    @property
    def name(self) -> str:
        return self.name_pattern.format_map(vars(self))

    def scaled_down(self: P) -> P:
        problem: Any = self
        return replace(problem, **{k: min(getattr(self, k), most) for k, most in LARGEST.items() if hasattr(self, k)})
