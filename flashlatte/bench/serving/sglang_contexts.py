"""Random contexts inside SGLang, for benchmarks: the same values in each engine.

Functions here take objects of SGLang and import nothing of it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def random_batch(one_batch: Any, runner: Any, requests: list[Any]) -> Any:
    """A batch of requests with random rows in the cache in place of their prompts' keys.

    The next forward pass is a decode step.

    Args:
        one_batch: the module ``sglang.benchmark.one_batch``.
        runner: SGLang's ``ModelRunner``, with empty pools.
        requests: SGLang's requests, with prompts of equal length.
    """
    tree_cache = one_batch.TreeCacheNamespace(
        page_size=runner.server_args.page_size,
        device=runner.device,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
    )
    batch = one_batch.ScheduleBatch.init_new(
        reqs=requests,
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        tree_cache=tree_cache,
        model_config=runner.model_config,
        enable_overlap=False,
        spec_algorithm=one_batch.SpeculativeAlgorithm.NONE,
    )
    # Allocates the slots of all prompts, which a forward pass would fill.
    batch.prepare_for_extend()
    batch.prefill_input_ids_cpu = None
    fill(runner.token_to_kv_pool, batch.out_cache_loc.view(len(requests), -1))
    return batch


def fill(pool: Any, slots: torch.Tensor) -> None:
    """Fill the rows of requests in each layer's cache.

    The rows are normally distributed values, which depend on the request's number and the layer alone: not on the
    slots, the page size or the cache format. The pool writes them in its format.

    Args:
        pool: SGLang's ``MLATokenToKVPool`` or ``DSATokenToKVPool``.
        slots: int64 [requests, tokens].
    """
    for number, request in enumerate(slots):
        for layer in range(pool.layer_num):
            generator = torch.Generator(slots.device).manual_seed(number * pool.layer_num + layer)
            shape = len(request), 1, pool.kv_lora_rank + pool.qk_rope_head_dim
            rows = torch.empty(shape, dtype=torch.bfloat16, device=slots.device).normal_(generator=generator)
            nope, rope = rows.split([pool.kv_lora_rank, pool.qk_rope_head_dim], dim=-1)
            pool.set_mla_kv_buffer(SimpleNamespace(layer_id=layer), request, nope.contiguous(), rope.contiguous())
            if hasattr(pool, "set_index_k_scale_buffer"):
                keys = torch.empty(len(request), pool.index_head_dim, device=slots.device).normal_(generator=generator)
                scales = torch.ones(len(request), 1, device=slots.device)
                pool.set_index_k_scale_buffer(layer, request, keys.to(torch.float8_e4m3fn), scales)
