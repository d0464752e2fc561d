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

import threading
from typing import Any

from triton.runtime import jit

_lock = threading.Lock()


def hash_source(jitted: Any) -> None:
    """Hash a function, and the functions that it calls, if Triton has not done so."""
    if getattr(jitted, "hash", "") is not None:
        return
    with _lock:
        finder = getattr(jit, "DependenciesFinder", None)
        if hasattr(finder, "_update_hash"):
            _hash_with(finder, jitted)


def _hash_with(finder: Any, jitted: Any) -> None:
    add = finder._update_hash

    def add_without_constants(self: Any, function: Any) -> None:
        _ = function.cache_key  # it has those of the function's constants
        constants, function.used_global_vals = function.used_global_vals, {}
        try:
            add(self, function)
        finally:
            function.used_global_vals = constants

    finder._update_hash = add_without_constants
    try:
        _ = jitted.cache_key
    finally:
        finder._update_hash = add
