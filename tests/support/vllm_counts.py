"""Counts the calls of FlashLatte's operations within each of vLLM's workers: ``worker_extension_cls``."""

from __future__ import annotations

import collections
import importlib

# The modules in which the integration looks up each operation.
DENSE, SPARSE, INDEXER = (f"flashlatte.integrations.vllm.backends.{name}" for name in ("dense", "sparse", "indexer"))
PLACES = {
    "cache_write": "flashlatte.integrations.vllm.backends.common",
    "dense_decode": DENSE,
    "dense_prefill": "flashlatte.layers.prefill",
    "cache_gather": "flashlatte.layers.cache",
    "merge_states": "flashlatte.layers.prefill",
    "attend_selected_rows": SPARSE,
    "index_query": "flashlatte.integrations.vllm.backends.fused_rows",
    "sparse_decode": SPARSE,
    "paged_index_logits": INDEXER,
    "global_topk": INDEXER,
    "index_quantize": INDEXER,
    "index_gather": INDEXER,
    "index_select": INDEXER,
    "paged_index_select": INDEXER,
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
