"""Counts the calls of FlashLatte's operations within each of vLLM's workers: ``worker_extension_cls``."""

from __future__ import annotations

import collections
import importlib

# Where the integration finds each operation.
PLACES = {
    "cache_write": "flashlatte.integrations.vllm.backends.dense",
    "dense_decode": "flashlatte.integrations.vllm.backends.dense",
    "dense_prefill": "flashlatte.layers.prefill",
    "cache_gather": "flashlatte.layers.prefill",
    "merge_states": "flashlatte.layers.prefill",
}


class CountsCalls:
    def count_calls(self) -> None:
        self._calls: collections.Counter[str] = collections.Counter()
        for name, place in PLACES.items():
            module = importlib.import_module(place)
            real = getattr(module, name)
            setattr(module, name, _counting(name, getattr(real, "real", real), self._calls))

    def calls(self) -> dict[str, int]:
        return dict(self._calls)


def _counting(name, real, calls):
    def counted(*arguments, **options):
        calls[name] += 1
        return real(*arguments, **options)

    counted.real = real
    return counted
