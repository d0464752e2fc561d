"""Hashes of kernels' sources, by which Triton finds compiled kernels, that are the same in every process.

A function's hash covers its source, its global constants and the functions that it calls. Triton adds the constants of
a called function once more if that function was hashed before, for example for another kernel. A kernel's hash would so
depend on the kernels that the process launched before it, and kernels compiled in another order would be compiled
again.

Assumptions about Triton: ``JITFunction.hash`` is None before the first ``cache_key``; that hashes through
``DependenciesFinder._update_hash(function)`` for each called function, which adds ``function.used_global_vals`` to the
caller's. Without these, Triton's own hashes remain.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import jit


def hash_source(jitted: Any) -> None:
    """Hash a function, and the functions that it calls, if Triton has not done so."""
    finder = getattr(jit, "DependenciesFinder", None)
    add = getattr(finder, "_update_hash", None)
    if getattr(jitted, "hash", "") is not None or add is None:
        return

    def add_without_constants(self: Any, function: Any) -> None:
        _ = function.cache_key  # it has those of the function's constants
        constants, function.used_global_vals = function.used_global_vals, {}
        try:
            add(self, function)
        finally:
            function.used_global_vals = constants

    finder._update_hash = add_without_constants  # type: ignore[union-attr]
    try:
        _ = jitted.cache_key
    finally:
        finder._update_hash = add  # type: ignore[union-attr]
