"""One run of the demo: generate, time it, and take the logits along given tokens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Run:
    """Attributes:
    tokens: int64 [n], what ``generate`` wrote.
    tokens_per_second: n over the time of the whole call, prefill included.
    """

    tokens: torch.Tensor
    tokens_per_second: float


def generate(
    model: Any, prompt: torch.Tensor, count: int, suppressed: Sequence[int], advance: Callable[[], None]
) -> Run:
    """Greedy generation of ``count`` tokens after ``prompt`` [1, n], none of ``suppressed``, after a warm-up."""
    from transformers.generation.streamers import BaseStreamer

    class Progress(BaseStreamer):
        def __init__(self) -> None:
            self.prompt_seen = False

        def put(self, value: torch.Tensor) -> None:
            if self.prompt_seen:
                advance()
            self.prompt_seen = True

        def end(self) -> None:
            pass

    options = {
        "attention_mask": torch.ones_like(prompt),
        "do_sample": False,
        "suppress_tokens": list(suppressed),
    }
    model.generate(prompt, max_new_tokens=2, **options)
    _synchronize(prompt.device)
    start = time.perf_counter()
    sequence = model.generate(prompt, max_new_tokens=count, streamer=Progress(), **options)
    _synchronize(prompt.device)
    seconds = time.perf_counter() - start
    return Run(sequence[0, prompt.shape[1] :], count / seconds)


@torch.no_grad()
def logits_along(model: Any, prompt: torch.Tensor, tokens: torch.Tensor, advance: Callable[[], None]) -> torch.Tensor:
    """The logits [n, vocabulary] from which each of ``tokens`` [n] would be chosen, decoded one by one."""
    rows, cache, ids = [], None, prompt
    for token in tokens:
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        rows.append(out.logits[0, -1].float())
        cache, ids = out.past_key_values, token.view(1, 1)
        advance()
    return torch.stack(rows)


@contextlib.contextmanager
def choices_made(model: Any) -> Iterator[list[frozenset[int]]]:
    """The tokens that each layer's indexer chose for each single token decoded within, in order.

    Of stock attention and of FlashLatte's, where a choice is slots, which are turned into positions.
    """
    made: list[frozenset[int]] = []

    def stock(module: Any, args: Any, output: torch.Tensor) -> None:
        if output.shape[1] == 1:
            made.append(frozenset(output.flatten().tolist()))

    def paged(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        latents = getattr(kwargs.get("past_key_values"), "latents", None)
        metadata = None if latents is None else latents.metadata(output[0].device)
        if metadata is None or metadata.decode is None or metadata.selection is None:
            return
        pages = {page: place for place, page in enumerate(metadata.decode.block_table[0].tolist())}
        slots, size = metadata.selection.slots, metadata.page_size
        made.append(frozenset(pages[slot // size] * size + slot % size for slot in slots[0].tolist() if slot >= 0))

    attentions = [layer.self_attn for layer in model.model.layers]
    hooks = [attention.indexer.register_forward_hook(stock) for attention in attentions]
    hooks += [attention.register_forward_hook(paged, with_kwargs=True) for attention in attentions]
    try:
        yield made
    finally:
        for hook in hooks:
            hook.remove()


def overlap(made: Sequence[frozenset[int]], wanted: Sequence[frozenset[int]]) -> float:
    """The share of ``wanted``'s tokens that ``made`` has too."""
    both = sum(len(mine & other) for mine, other in zip(made, wanted, strict=True))
    return both / sum(len(other) for other in wanted)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
