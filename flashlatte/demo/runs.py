"""Runs of the demo in transformers and in the engine: generation, its speed, and logits along given tokens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashlatte.engine import Engine, Model, SamplingParams
from flashlatte.engine.batch import EngineLimits, StepBatch
from flashlatte.engine.paged import PagedModel
from flashlatte.integrations.transformers.calls import CACHE
from flashlatte.layers import MLAMetadata


@dataclass(frozen=True)
class Run:
    """Generated tokens, and the speed.

    Attributes:
        tokens: int64 [n], on the CPU.
        tokens_per_second: n over the time of the whole call, prefill included.
    """

    tokens: torch.Tensor
    tokens_per_second: float


def generate_by_transformers(
    model: Any, prompt: Sequence[int], count: int, suppressed: Sequence[int], advance: Callable[[], None]
) -> Run:
    """Generate ``count`` tokens after ``prompt`` greedily, without ``suppressed`` tokens, after a warm-up run."""
    from transformers.generation.streamers import BaseStreamer

    class Progress(BaseStreamer):
        def __init__(self) -> None:
            self.prompt_history = False

        def put(self, value: torch.Tensor) -> None:
            if self.prompt_history:
                advance()
            self.prompt_history = True

        def end(self) -> None:
            pass

    ids = torch.tensor([prompt], device=model.device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "suppress_tokens": list(suppressed)}
    model.generate(ids, max_new_tokens=2, **options)
    _synchronize(ids.device)
    start = time.perf_counter()
    sequence = model.generate(ids, max_new_tokens=count, streamer=Progress(), **options)
    _synchronize(ids.device)
    seconds = time.perf_counter() - start
    return Run(sequence[0, len(prompt) :].cpu(), count / seconds)


def generate_by_engine(
    model: PagedModel,
    cache_format: str,
    prompt: Sequence[int],
    count: int,
    suppressed: Sequence[int],
    advance: Callable[[], None],
) -> Run:
    """``generate_by_transformers`` with the engine, over a cache of this format."""
    # The warm-up must not leave the prompt's pages in the prefix cache. Float32 models cannot be captured in a graph.
    pages = -(-(len(prompt) + count) // model.page_size)
    engine = Engine(model, cache_format=cache_format, num_pages=pages, enable_prefix_caching=False, cuda_graphs=False)
    engine.generate([prompt], SamplingParams(temperature=0, max_tokens=2, suppress_tokens=tuple(suppressed)))
    _synchronize(model.device)
    start = time.perf_counter()
    tokens = []
    for token in engine.stream(
        prompt, SamplingParams(temperature=0, max_tokens=count, suppress_tokens=tuple(suppressed))
    ):
        tokens.append(token)
        advance()
    seconds = time.perf_counter() - start
    return Run(torch.tensor(tokens), count / seconds)


@torch.no_grad()
def logits_of_transformers(
    model: Any, prompt: Sequence[int], tokens: torch.Tensor, advance: Callable[[], None]
) -> torch.Tensor:
    """The logits [n, vocabulary] from which each of ``tokens`` [n] would be chosen, decoded one by one."""
    rows, cache, ids = [], None, torch.tensor([prompt], device=model.device)
    for token in tokens.to(model.device):
        out = model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
        rows.append(out.logits[0, -1].float())
        cache, ids = out[CACHE], token.view(1, 1)
        advance()
    return torch.stack(rows)


def logits_of_engine(
    model: PagedModel, cache_format: str, prompt: Sequence[int], tokens: torch.Tensor, advance: Callable[[], None]
) -> torch.Tensor:
    """``logits_of_transformers`` with the engine's model, over a cache of this format."""
    longest, page_size = len(prompt) + len(tokens), model.page_size
    pages = -(-longest // page_size)
    caches = model.allocate(cache_format, pages, page_size)
    plan = model.planner(
        cache_format, EngineLimits(pages, page_size, 0, max_num_batched_tokens=len(prompt), max_num_seqs=1)
    )
    rows, ids, length = [], list(prompt), len(prompt)
    for token in tokens.tolist():
        last = len(ids) - 1
        metadata = plan(StepBatch([], [], [len(ids)], [length], [0], [list(range(pages))], [0], ids, [last], [0]), None)
        flat = torch.tensor(ids, device=model.device)
        rows.append(model(flat, caches, metadata, torch.tensor([last], device=model.device))[0].float())
        ids, length = [token], length + 1
        advance()
    return torch.stack(rows)


@contextlib.contextmanager
def choices_of_transformers(model: Any) -> Iterator[list[frozenset[int]]]:
    """Collect the tokens that each layer's indexer selects, for each token that is decoded in the context, in order."""
    made: list[frozenset[int]] = []

    def record(module: Any, args: Any, output: torch.Tensor) -> None:
        if output.shape[1] == 1:
            made.append(frozenset(output.flatten().tolist()))

    hooks = [layer.self_attn.indexer.register_forward_hook(record) for layer in model.model.layers]
    with _removed(hooks):
        yield made


@contextlib.contextmanager
def choices_of_engine(model: Model) -> Iterator[list[frozenset[int]]]:
    """``choices_of_transformers`` for ``logits_of_engine``, where slots are positions."""
    made: list[frozenset[int]] = []

    def record(module: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
        metadata: MLAMetadata = args[2]
        if metadata.num_tokens > 1 or metadata.selection is None:
            return
        slots = metadata.selection.slots
        chosen = range(metadata.max_seq_len) if slots is None else [slot for slot in slots[0].tolist() if slot >= 0]
        made.append(frozenset(chosen))

    layers = [layer for layer in model.attention if isinstance(layer, torch.nn.Module)]
    with _removed([layer.register_forward_hook(record) for layer in layers]):
        yield made


@contextlib.contextmanager
def _removed(hooks: Sequence[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def overlap(made: Sequence[frozenset[int]], wanted: Sequence[frozenset[int]]) -> float:
    """The fraction of the tokens of ``wanted`` that ``made`` contains."""
    both = sum(len(mine & other) for mine, other in zip(made, wanted, strict=True))
    return both / sum(len(other) for other in wanted)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
