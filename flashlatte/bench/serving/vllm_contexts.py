"""Random contexts and weights inside vLLM, for benchmarks: the same numbers in each engine.

vLLM imports this module in an engine's process. Only there may it be imported.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from flashlatte.bench.serving.random_model import fill_weights
from flashlatte.bench.serving.random_pages import fill_pages
from flashlatte.bench.serving.step_cases import PREFILLED, request_number


class RandomContexts(DecodeBenchConnector):
    """A KV connector that supplies the whole context of a request except its last token.

    The rows are normally distributed values, which depend on the request's number alone: neither on the pages nor on
    what ran before. Requests whose names begin with ``PREFILLED`` are excepted.
    """

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        groups = {
            name: group for group, one in enumerate(self._kv_cache_config.kv_cache_groups) for name in one.layer_names
        }
        # Each cache, and the group of caches with the same pages to which it belongs. V4 has several groups.
        self.caches = [(_without_head(kv_caches[name]), groups[name]) for name in sorted(kv_caches)]
        if any(len(cache) != self._kv_cache_config.num_blocks for cache, _ in self.caches):
            raise ValueError("--random-contexts needs caches whose pages are vLLM's blocks: set another block_size")

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        for name, (blocks_of_groups, _) in self._get_connector_metadata().reqs_to_fill.items():
            for layer, (cache, group) in enumerate(self.caches):
                generator = torch.Generator(cache.device).manual_seed(request_number(name) * len(self.caches) + layer)
                fill_pages(cache, blocks_of_groups[group], generator)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.request_id.startswith(PREFILLED):
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


def _without_head(cache: torch.Tensor) -> torch.Tensor:
    """A cache as [pages, page_size, width]. vLLM may have one head before or after the tokens of a page."""
    return cache if cache.dim() == 3 else cache.squeeze(1 if cache.shape[1] == 1 else 2)


@register_model_loader("random")
class RandomWeights(BaseModelLoader):
    """``fill_weights`` as vLLM's load format ``random``."""

    def download_model(self, model_config: Any) -> None:
        pass

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        fill_weights(model.named_parameters())
