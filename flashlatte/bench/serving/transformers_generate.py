"""Generation by transformers: ``generate`` and continuous batching."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flashlatte.bench.timing import microseconds


def generate(model: Any, prompts: list[list[int]], new: int) -> float:
    """Seconds of ``generate`` on a batch of prompts of one length, after a short warm-up."""
    ids = torch.tensor(prompts, device=model.device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    model.generate(ids, max_new_tokens=2, **options)
    return microseconds(lambda: model.generate(ids, max_new_tokens=new, **options)) / 1e6


def generate_batch(model: Any, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
    """Seconds of continuous batching, from the first request's start to the last one's end, and the tokens.

    Its set-up (cache, graphs) is not included.
    """
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with values_as_wide_as_keys(model):
        outputs = list(model.generate_batch(prompts, generation_config=config).values())
    wrong = next((output.error for output in outputs if output.error), None)
    if wrong or len(outputs) != len(prompts):
        raise RuntimeError(f"generate_batch served {len(outputs)} of {len(prompts)} requests: {wrong}")
    seconds = max(output.lifespan[1] for output in outputs) - min(output.lifespan[0] for output in outputs)
    return seconds, [output.generated_tokens for output in outputs]


@contextlib.contextmanager
def values_as_wide_as_keys(model: Any) -> Iterator[None]:
    """Lets continuous batching serve an MLA model.

    Its cache has one width for keys and values, the configuration's ``head_dim``; in MLA that is the RoPE part's.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = model.config
    names = [name for name in ("sdpa", "paged|sdpa") if name in ALL_ATTENTION_FUNCTIONS.valid_keys()]
    stock = {name: ALL_ATTENTION_FUNCTIONS[name] for name in names}
    head_dim = config.head_dim
    config.head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    for name, function in stock.items():
        ALL_ATTENTION_FUNCTIONS[name] = _padded(function)
    try:
        yield
    finally:
        config.head_dim = head_dim
        for name, function in stock.items():
            ALL_ATTENTION_FUNCTIONS[name] = function


def _padded(function: Callable[..., Any]) -> Callable[..., Any]:
    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Any]:
        width = value.shape[-1]
        wide = torch.nn.functional.pad(value, (0, key.shape[-1] - width))
        out, weights = function(module, query, key, wide, *args, **kwargs)
        return out[..., :width], weights

    return attend
